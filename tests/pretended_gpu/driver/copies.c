// Copies and memsets. They are done at once, also in a capture, whose replay is somebody else's.
//
// The host waits for a copy that was not asked to be asynchronous, and for one between a card and pageable memory,
// which CUDA can only stage.
#include "card.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define LARGE (4ul << 20)  // zeros of this many bytes are made by giving the pages back
#define PAGE 4096ul

static const char *home_name(Home home) {
    static const char *names[] = {"pageable", "pinned", "pinned", "device"};
    return names[home];
}

static void log_copy(const Block *from, const Block *to, size_t bytes, const Stream *stream, bool waits) {
    bool between_cards = from->home == DEVICE && to->home == DEVICE && from->card != to->card;
    note(
        "copy\tkind=%s->%s\tbytes=%zu\twaits=%d\t%s", home_name(from->home),
        between_cards ? "peer" : home_name(to->home), bytes, waits, where(stream).text
    );
}

// What a copy may not do while it, or another stream, is captured.
static cudaError_t copy_in_capture(const Stream *stream, bool waits, bool asynchronous, const char *call) {
    if (stream->capture && waits)
        return invalidated(stream->capture, cudaErrorStreamCaptureUnsupported, "a copy of pageable memory");
    return asynchronous ? cudaSuccess : unsafe(call);
}

static cudaError_t copy(
    void *target, const void *source, size_t bytes, void *handle, bool asynchronous, const char *call
) {
    Stream *stream = stream_of(handle, call);
    if (!stream)
        return cudaErrorInvalidResourceHandle;
    Block from = block_of(source);
    Block to = block_of(target);
    bool staged = (from.home == PAGEABLE && to.home == DEVICE) || (from.home == DEVICE && to.home == PAGEABLE);
    bool waits = staged || !asynchronous;
    cudaError_t error = copy_in_capture(stream, waits, asynchronous, call);
    if (!error)
        error = work_on(stream, call);
    if (error)
        return error;
    log_copy(&from, &to, bytes, stream, waits);
    tell(COPIED, stream, NULL);
    memmove(target, source, bytes);
    LOCKED;
    stream->card->counts.copies++;
    stream->card->counts.waiting_copies += waits;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    return failed(copy(target, source, bytes, NULL, false, "cudaMemcpy"));
}

cudaError_t cudaMemcpyAsync(
    void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    return failed(copy(target, source, bytes, stream, true, "cudaMemcpyAsync"));
}

static cudaError_t on_card(const void *address, int card) {
    Block block = block_of(address);
    if (block.home == DEVICE && block.card == card_at(card))
        return cudaSuccess;
    const char *what = "cudaMemcpyPeerAsync of %p, said to be on card %d";
    return fault(current_card(), cudaErrorInvalidValue, "wrong card", what, address, card);
}

cudaError_t cudaMemcpyPeerAsync(
    void *target, int target_card, const void *source, int source_card, size_t bytes, cudaStream_t stream
) {
    cudaError_t error = on_card(target, target_card);
    if (!error)
        error = on_card(source, source_card);
    if (!error)
        error = copy(target, source, bytes, stream, true, "cudaMemcpyPeerAsync");
    return failed(error);
}

cudaError_t cudaMemcpy2DAsync(
    void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream
) {
    for (size_t row = 0; row < height; ++row) {
        void *to = (char *)target + row * target_pitch;
        const void *from = (const char *)source + row * source_pitch;
        cudaError_t error = copy(to, from, width, stream, true, "cudaMemcpy2DAsync");
        if (error)
            return failed(error);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(
    const void *symbol, const void *source, size_t bytes, size_t offset, enum cudaMemcpyKind kind
) {
    return cudaSuccess;  // only kernels read symbols, and they do nothing
}

// ---- memsets

// Zeros, without touching each page of a card that may be larger than this machine.
static void clear(void *target, size_t bytes) {
    uintptr_t begin = (uintptr_t)target;
    uintptr_t first = (begin + PAGE - 1) & ~(PAGE - 1);
    uintptr_t last = (begin + bytes) & ~(PAGE - 1);
    memset(target, 0, first - begin);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, begin + bytes - last);
}

// Begins a memset: refuses it, or writes it down.
static cudaError_t begin_memset(Stream *stream, const void *target, size_t bytes, const char *call) {
    if (!stream)
        return cudaErrorInvalidResourceHandle;
    cudaError_t error = within_reach(stream->card, target, call);
    if (!error)
        error = work_on(stream, call);
    if (error)
        return error;
    note("memset\tbytes=%zu\t%s", bytes, where(stream).text);
    tell(COPIED, stream, NULL);
    LOCKED;
    stream->card->counts.memsets++;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t handle) {
    Stream *stream = stream_of(handle, "cudaMemsetAsync");
    cudaError_t error = bytes ? begin_memset(stream, target, bytes, "cudaMemsetAsync") : cudaSuccess;
    if (error || !bytes)
        return failed(error);
    if (value == 0 && bytes >= LARGE && block_of(target).home == DEVICE)
        clear(target, bytes);
    else
        memset(target, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    return cudaMemsetAsync(target, value, bytes, NULL);
}

CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t words, CUstream handle) {
    Stream *stream = stream_of(handle, "cuMemsetD32Async");
    cudaError_t error = begin_memset(stream, (const void *)target, words * 4, "cuMemsetD32Async");
    for (size_t i = 0; i < words && !error; ++i)
        ((unsigned *)target)[i] = value;
    return (CUresult)error;
}
