// Memory of the cards and pinned memory of the host: allocation, what an address belongs to, and running out of it.
//
// Both are mapped pages, zero and without cost until they are written, so that a card may be larger than this machine.
#include "card.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>


static Block *blocks;  // in the order of their addresses
static int number;
static int room;

// ---- the blocks; whoever calls these holds the lock

// The index of the last block that begins at the address or before it; -1 where there is none.
static int last_before(uintptr_t address) {
    int low = 0;
    int high = number;
    while (low < high) {
        int middle = (low + high) / 2;
        if (blocks[middle].at <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

static void add(Block block) {
    if (number == room) {
        room = room * 2 + 1024;
        blocks = realloc(blocks, (size_t)room * sizeof *blocks);
    }
    int at = last_before(block.at) + 1;
    memmove(blocks + at + 1, blocks + at, (size_t)(number - at) * sizeof *blocks);
    blocks[at] = block;
    number++;
    Counts *counts = &block.card->counts;
    if (block.home != DEVICE)
        return;
    counts->bytes += block.bytes;
    if (counts->bytes > counts->peak_bytes)
        counts->peak_bytes = counts->bytes;
}

static void take_out(int at) {
    Block block = blocks[at];
    memmove(blocks + at, blocks + at + 1, (size_t)(number - at - 1) * sizeof *blocks);
    number--;
    if (block.home == DEVICE)
        block.card->counts.bytes -= block.bytes;
}

Block block_of(const void *address) {
    LOCKED;
    int at = last_before((uintptr_t)address);
    if (at >= 0 && (uintptr_t)address < blocks[at].at + blocks[at].bytes)
        return blocks[at];
    return (Block){0, 0, PAGEABLE, NULL};
}

cudaError_t within_reach(Card *card, const void *address, const char *call) {
    Block block = block_of(address);
    if (block.home == PAGEABLE)
        return fault(card, cudaErrorInvalidValue, "unknown memory", "%s of %p", call, address);
    if (block.home == DEVICE && block.card != card && !card->reaches[block.card->number])
        return fault(
            card, cudaErrorInvalidValue, "wrong card", "%s of %p, memory of card %d", call, address, block.card->number
        );
    return cudaSuccess;
}

// ---- allocation

static void *mapped(size_t bytes, Home home, Card *card) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (address == MAP_FAILED)
        return NULL;
    add((Block){(uintptr_t)address, bytes, home, card});
    return address;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    Card *card = current_card();
    cudaError_t error = unsafe("cudaMalloc");
    if (error)
        return failed(error);
    LOCKED;
    bool fits = card->counts.bytes + bytes + CONTEXT_BYTES <= total_bytes();
    card->counts.mallocs++;
    note("allocation\thome=device\tbytes=%zu\tcard=%d\trefused=%d", bytes, card->number, !fits);
    *address = fits && bytes ? mapped(bytes, DEVICE, card) : NULL;
    return *address || !bytes ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    Card *card = current_card();
    cudaError_t error = unsafe("cudaHostAlloc");
    if (error)
        return failed(error);
    LOCKED;
    card->counts.host_allocations++;
    note("allocation\thome=pinned\tbytes=%zu\tcard=%d\trefused=0", bytes, card->number);
    *address = bytes ? mapped(bytes, PINNED, card) : NULL;
    return *address || !bytes ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

// Gives back a block of this home that begins at the address.
static cudaError_t give_back(void *address, Home home, cudaError_t unknown, const char *call) {
    cudaError_t error = unsafe(call);
    if (error)
        return failed(error);
    // Work that is still to come may use the memory: CUDA waits for it before it frees.
    tell(DEVICE_SYNCHRONIZED, NULL, NULL);
    LOCKED;
    Block block = block_of(address);
    if (block.home != home || block.at != (uintptr_t)address)
        return failed(fault(current_card(), unknown, "unknown memory", "%s of %p", call, address));
    take_out(last_before(block.at));
    if (home != REGISTERED)
        munmap(address, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    return address ? give_back(address, DEVICE, cudaErrorInvalidValue, "cudaFree") : cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    return address ? give_back(address, PINNED, cudaErrorInvalidValue, "cudaFreeHost") : cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    cudaError_t error = unsafe("cudaHostRegister");
    if (error)
        return failed(error);
    LOCKED;
    Card *card = current_card();
    int before = last_before((uintptr_t)address + bytes - 1);
    if (before >= 0 && blocks[before].at + blocks[before].bytes > (uintptr_t)address)
        return failed(fault(
            card, cudaErrorHostMemoryAlreadyRegistered, "registered twice", "cudaHostRegister of %p", address
        ));
    add((Block){(uintptr_t)address, bytes, REGISTERED, card});
    note("allocation\thome=registered\tbytes=%zu\tcard=%d\trefused=0", bytes, card->number);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    return give_back(address, REGISTERED, cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}

// ---- what an address is

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *is, const void *address) {
    Block block = block_of(address);
    memset(is, 0, sizeof *is);
    is->type = cudaMemoryTypeUnregistered;
    is->hostPointer = (void *)address;
    if (block.home == PAGEABLE)
        return cudaSuccess;
    is->device = block.card->number;
    is->devicePointer = (void *)address;
    is->type = cudaMemoryTypeHost;
    if (block.home != DEVICE)
        return cudaSuccess;
    is->type = cudaMemoryTypeDevice;
    is->hostPointer = NULL;
    return cudaSuccess;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    Block block = block_of((const void *)address);
    if (block.home == PAGEABLE)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = block.home == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = block.card->number;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    Block block = block_of((const void *)address);
    if (block.home == PAGEABLE)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = block.at;
    if (bytes)
        *bytes = block.bytes;
    return CUDA_SUCCESS;
}

// ---- controls

// Writes down the memory that is allocated on a card, at most so many blocks; returns how many there are.
API int card_blocks(int card, uint64_t *at, uint64_t *bytes, int most) {
    LOCKED;
    int found = 0;
    for (int i = 0; i < number; ++i) {
        if (blocks[i].home != DEVICE || blocks[i].card->number != card)
            continue;
        if (found < most) {
            at[found] = blocks[i].at;
            bytes[found] = blocks[i].bytes;
        }
        found++;
    }
    return found;
}
