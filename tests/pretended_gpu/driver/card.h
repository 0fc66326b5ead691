// A pretended NVIDIA driver (libcuda.so.1), CUDA runtime and cuBLAS for a machine without a GPU: what its files share.
//
// Preloaded, it is found before NVIDIA's libraries, so that a CUDA build of torch runs on it: its allocator, streams,
// events, graph pools and kernel launches are the real ones. "Device memory" is the host's, copies are done at once,
// kernels and matrix products do nothing but are written down, and what CUDA forbids is refused.
//
//   device.c   the cards that are pretended, contexts, peers        kernels.c  launches and their limits
//   memory.c   allocations on cards and on the host                 module.c   cubins of Triton
//   copies.c   copies and memsets                                   blas.c     matrix products
//   streams.c  streams, events, host functions, waits               log.c      the log, errors, the lock
//   capture.c  CUDA graphs and the rules of their capture     order.c    a hook: work that is done later
#ifndef CARD_H
#define CARD_H
#define _GNU_SOURCE

// What NVIDIA's headers declare is exported; everything else is hidden (-fvisibility=hidden) unless it says API.
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cuda_runtime_api.h>
#pragma GCC visibility pop
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define MOST_CARDS 16
#define MOST_BRANCHES 64             // streams of one capture
#define CONTEXT_BYTES (512ul << 20)  // of a card's memory, which the driver takes for itself
#define REGISTERS 65536              // of a multiprocessor, and of one block at most
#define SHARED_UNASKED 49152         // bytes of shared memory that a block has if its kernel asks for no more
#define UNKNOWN_REGISTERS 32         // of a thread of a kernel whose code nobody looks into
#define UNUSED __attribute__((unused))

typedef struct Capture Capture;
typedef struct Card Card;
typedef struct Stream Stream;
typedef struct Event Event;

// The kind of card that all pretended cards are.
typedef struct {
    int sm;
    const char *name;
    double gib;
    int multiprocessors;
    int shared_kib;  // shared memory of a multiprocessor
    int threads;     // that one multiprocessor holds
} Model;

// What has happened on a card since the process began. card.py mirrors it, field by field.
typedef struct {
    uint64_t launches;  // of kernels and products
    uint64_t products;
    uint64_t graph_launches;
    uint64_t copies;
    uint64_t waiting_copies;  // for which the host waits, among `copies`
    uint64_t memsets;
    uint64_t stream_waits;  // of the host for a stream
    uint64_t device_waits;
    uint64_t event_waits;
    uint64_t mallocs;
    uint64_t host_allocations;
    uint64_t faults;
    uint64_t bytes;
    uint64_t peak_bytes;
} Counts;

// How many pieces of work of each branch of a capture come before a point (a vector clock).
typedef struct {
    uint64_t done[MOST_BRANCHES];
} Past;

struct Stream {
    Card *card;
    unsigned flags;
    int priority;
    bool destroyed;      // never freed, so that its use afterwards is seen
    uint64_t work;       // pieces of work so far
    uint64_t legacy_to;  // how much of this stream's work the card's legacy stream waits for already
    uint64_t to_legacy;  // how much of the legacy stream's work this stream waits for already
    Capture *capture;    // that it belongs to, or NULL
    int branch;          // its number there
    Past past;           // of its newest work there
    Stream *next;
};

struct Event {
    Card *card;
    unsigned flags;
    bool destroyed;
    bool recorded;
    double at_ms;
    Capture *capture;  // in which it was recorded last, or NULL
    Past past;
};

struct Capture {
    uint64_t number;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    Stream *origin;
    bool invalid;
    bool ended;
    int branches;
    size_t nodes;
    Capture *next;
};

struct Card {
    int number;
    bool used;                 // it has a primary context
    bool reaches[MOST_CARDS];  // the cards whose memory its kernels may use
    Stream legacy;             // the default stream, handle 0
    Counts counts;
};

// Memory that CUDA knows; all other is pageable.
typedef enum { PAGEABLE, PINNED, REGISTERED, DEVICE } Home;

typedef struct {
    uintptr_t at;
    size_t bytes;
    Home home;
    Card *card;
} Block;

// A launch of a kernel, with what decides whether it is possible.
typedef struct {
    const char *library;
    const char *name;
    dim3 grid;
    dim3 block;
    size_t shared_bytes;       // that the launch asks for, beside what the kernel has declared
    size_t most_shared_bytes;  // up to which it may ask
    int registers;             // of a thread
} Launch;

// Moments that a hook is told of, outside of the lock and before they take effect. card.py mirrors them.
typedef enum {
    EVENT_RECORDED = 1,   // (stream, event)
    STREAM_WAITS,         // (stream, event)
    STREAM_JOINS,         // (stream, another): it waits for all work of the other, by the rules of the default stream
    EVENT_SYNCHRONIZED,   // (-, event)
    EVENT_QUERIED,        // (-, event); the hook returns 1 for "not ready yet"
    STREAM_SYNCHRONIZED,  // (stream, -)
    STREAM_QUERIED,       // (stream, -); as above
    DEVICE_SYNCHRONIZED,  // of the calling thread's card; memory is freed after this, too
    COPIED,               // (stream, -): the runtime itself is about to copy or set memory on the stream
    HOST_FUNCTION,        // (stream, -): the host function is about to be called
} Moment;

typedef int (*Hook)(int moment, void *stream, void *event_or_stream);

// ---- log.c

// LOCKED; holds the driver's lock to the end of the block. It may be held more than once by a thread.
int lock(void);
void unlock(int *held);
#define LOCKED UNUSED __attribute__((cleanup(unlock))) int locked = lock()

// Writes a line: the kind, then fields "name=value", all separated by tabs.
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Writes and counts an illegal use; returns the error.
cudaError_t fault(Card *card, cudaError_t error, const char *rule, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
// Keeps the error for cudaGetLastError, as functions of the runtime do; returns it.
cudaError_t failed(cudaError_t error);

// ---- device.c

extern Model model;
extern int cards_pretended;
// The calling thread's card, which has a context from now on.
Card *current_card(void);
// NULL where there is none of this number.
Card *card_at(int number);
size_t total_bytes(void);
// What a block may use beyond 48 KiB if its kernel asks for it.
size_t most_shared_bytes(void);

// ---- memory.c

// The block that holds the address; its home is PAGEABLE where CUDA knows of none.
Block block_of(const void *address);
// An error and a fault where kernels of this card cannot use the memory.
cudaError_t within_reach(Card *card, const void *address, const char *call);

// ---- streams.c

// NULL, and a fault, where the stream was destroyed.
Stream *stream_of(void *handle, const char *call);
void *handle_of(const Stream *stream);
bool blocking(const Stream *stream);
// The fields of a line that say where something is done: its stream, its card, and whether the stream is captured, or
// another one is ("beside").
typedef struct {
    char text[96];
} Where;
Where where(const Stream *stream);
// All streams but the legacy ones.
extern Stream *streams;
// Begins anything on a stream: refuses what a capture forbids, and waits by the rules of the default stream.
cudaError_t enter(Stream *stream, const char *call);
// The same for work, which a capture takes up.
cudaError_t work_on(Stream *stream, const char *call);
// Tells the hook; returns what it returned.
int tell(Moment moment, const Stream *stream, const void *event_or_stream);

// ---- capture.c

bool any_capture(void);
// Refuses a call that may not be made while a capture is under way, which becomes invalid.
cudaError_t unsafe(const char *call);
// Makes a capture invalid because of a call; returns the error.
cudaError_t invalidated(Capture *capture, cudaError_t error, const char *call);
// Refuses an action on a stream whose capture is invalid, and one on the legacy stream that would wait for a capture.
cudaError_t may_act(const Stream *stream, const char *call);
cudaError_t may_wait(const Stream *stream, const Event *event);
// Refuses to ask whether an event is done that stands for work of a capture.
cudaError_t may_ask(const Event *event, const char *call);
// Their effects in a capture, each after its check.
void add_node(Stream *stream);
void record_in_capture(const Stream *stream, Event *event);
void wait_in_capture(Stream *stream, const Event *event);

// ---- kernels.c

cudaError_t launch_kernel(const Launch *launch, void *stream, bool by_driver);
int most_threads(int registers);

#endif
