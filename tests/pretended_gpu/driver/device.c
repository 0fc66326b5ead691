// The cards that are pretended: what they are, their contexts, and who may use whose memory.
//
//   PRETENDED_SM=90 PRETENDED_NAME="NVIDIA H200" PRETENDED_GIB=140.4 PRETENDED_SMS=132 PRETENDED_CARDS=1
#include "card.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 13000  // of CUDA

// NVIDIA's datasheets and architecture whitepapers; shared memory and threads: the CUDA C++ programming guide, table of
// compute capabilities.
static const Model models[] = {
    {75, "Tesla T4", 16, 40, 64, 1024},
    {80, "NVIDIA A100-SXM4-80GB", 80, 108, 164, 2048},
    {86, "NVIDIA GeForce RTX 3090", 24, 82, 100, 1536},
    {89, "NVIDIA GeForce RTX 4090", 24, 128, 100, 1536},
    {90, "NVIDIA H200", 140.4, 132, 228, 2048},
    {100, "NVIDIA B200", 180, 148, 228, 2048},
    {120, "NVIDIA GeForce RTX 5090", 32, 170, 100, 1536},
};

Model model;
int cards_pretended;
static Card cards[MOST_CARDS];
static __thread int current;  // the calling thread's card

static double setting(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value ? atof(value) : otherwise;
}

static void refuse_to_start(const char *what) {
    fprintf(stderr, "the pretended driver: %s\n", what);
    exit(2);
}

__attribute__((constructor)) static void read_settings(void) {
    int sm = (int)setting("PRETENDED_SM", 90);
    for (size_t i = 0; i < sizeof models / sizeof *models; ++i)
        if (models[i].sm == sm)
            model = models[i];
    if (!model.sm)
        refuse_to_start("PRETENDED_SM is none of 75 80 86 89 90 100 120");
    if (getenv("PRETENDED_NAME"))
        model.name = getenv("PRETENDED_NAME");
    model.gib = setting("PRETENDED_GIB", model.gib);
    model.multiprocessors = (int)setting("PRETENDED_SMS", model.multiprocessors);
    cards_pretended = (int)setting("PRETENDED_CARDS", 1);
    if (cards_pretended < 1 || cards_pretended > MOST_CARDS)
        refuse_to_start("PRETENDED_CARDS is not between 1 and 16");
    for (int i = 0; i < MOST_CARDS; ++i) {
        cards[i].number = i;
        cards[i].legacy.card = &cards[i];
    }
}

Card *card_at(int number) {
    return number >= 0 && number < cards_pretended ? &cards[number] : NULL;
}

Card *current_card(void) {
    cards[current].used = true;
    return &cards[current];
}

size_t total_bytes(void) {
    return (size_t)(model.gib * (1ul << 30));
}

size_t most_shared_bytes(void) {
    // Since Ampere the system keeps 1 KiB of each block's.
    return (size_t)model.shared_kib * 1024 - (model.sm >= 80 ? 1024 : 0);
}

// ---- which card

cudaError_t cudaGetDeviceCount(int *number) {
    *number = cards_pretended;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *number) {
    *number = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    if (!card_at(number))
        return failed(cudaErrorInvalidDevice);
    current = number;
    current_card();
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}

// ---- what a card is

static const struct {
    enum cudaDeviceAttr attribute;
    int value;
} same_for_all[] = {
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, SHARED_UNASKED},
    {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
    {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
    // Rates are an H200's, whatever the card: times are pretended, too.
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 3201000},
    {cudaDevAttrGlobalMemoryBusWidth, 6144},
    {cudaDevAttrL2CacheSize, 50 << 20},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrMemoryPoolsSupported, 1},
    {cudaDevAttrHostRegisterSupported, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrConcurrentKernels, 1},
};

static int attribute_of(enum cudaDeviceAttr attribute) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        return model.sm / 10;
    case cudaDevAttrComputeCapabilityMinor:
        return model.sm % 10;
    case cudaDevAttrMultiProcessorCount:
        return model.multiprocessors;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return (int)most_shared_bytes();
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return model.shared_kib * 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return model.threads;
    default:
        break;
    }
    for (size_t i = 0; i < sizeof same_for_all / sizeof *same_for_all; ++i)
        if (same_for_all[i].attribute == attribute)
            return same_for_all[i].value;
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int card) {
    if (!card_at(card))
        return failed(cudaErrorInvalidDevice);
    *value = attribute_of(attribute);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int card) {
    if (!card_at(card))
        return failed(cudaErrorInvalidDevice);
    memset(is, 0, sizeof *is);
    snprintf(is->name, sizeof is->name, "%s", model.name);
    is->major = model.sm / 10;
    is->minor = model.sm % 10;
    is->totalGlobalMem = total_bytes();
    is->multiProcessorCount = model.multiprocessors;
    is->maxThreadsPerMultiProcessor = model.threads;
    is->sharedMemPerBlock = SHARED_UNASKED;
    is->sharedMemPerBlockOptin = most_shared_bytes();
    is->sharedMemPerMultiprocessor = (size_t)model.shared_kib * 1024;
    is->regsPerBlock = is->regsPerMultiprocessor = REGISTERS;
    is->warpSize = 32;
    is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024;
    is->maxThreadsDim[2] = 64;
    is->maxGridSize[0] = 2147483647;
    is->maxGridSize[1] = is->maxGridSize[2] = 65535;
    is->maxBlocksPerMultiProcessor = 32;
    is->totalConstMem = 65536;
    is->textureAlignment = 512;
    is->memoryBusWidth = 6144;
    is->l2CacheSize = 50 << 20;
    is->asyncEngineCount = 3;
    is->concurrentKernels = is->cooperativeLaunch = is->streamPrioritiesSupported = 1;
    is->unifiedAddressing = is->managedMemory = is->canMapHostMemory = is->hostRegisterSupported = 1;
    is->memoryPoolsSupported = 1;
    is->clusterLaunch = model.sm >= 90;
    is->pciBusID = card + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int card) {
    snprintf(text, (size_t)room, "0000:%02x:00.0", card + 1);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    LOCKED;
    *total = total_bytes();
    *free_bytes = *total - CONTEXT_BYTES - current_card()->counts.bytes;
    return cudaSuccess;
}

// ---- peers

cudaError_t cudaDeviceCanAccessPeer(int *can, int card, int peer) {
    if (!card_at(card) || !card_at(peer))
        return failed(cudaErrorInvalidDevice);
    *can = card != peer;
    return cudaSuccess;
}

// Lets the current card's kernels use the peer's memory, or no longer; an error if that is so already.
static cudaError_t set_peer_access(int peer, bool wanted, cudaError_t already) {
    LOCKED;
    Card *card = current_card();
    if (!card_at(peer) || peer == card->number)
        return failed(cudaErrorInvalidDevice);
    if (card->reaches[peer] == wanted)
        return failed(already);
    card->reaches[peer] = wanted;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return set_peer_access(peer, true, cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    return set_peer_access(peer, false, cudaErrorPeerAccessNotEnabled);
}

API cudaError_t cudaProfilerStart(void) {
    return cudaSuccess;
}

API cudaError_t cudaProfilerStop(void) {
    return cudaSuccess;
}

// ---- the driver's names for the same; a card is its own context

static __thread CUcontext pushed[16];
static __thread int pushes;

CUresult cuInit(unsigned flags) {
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *number) {
    *number = cards_pretended;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return card_at(number) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *text, int room, CUdevice device) {
    snprintf(text, (size_t)room, "%s", model.name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = total_bytes();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    // Both enumerations have the same numbers.
    *value = attribute_of((enum cudaDeviceAttr)attribute);
    return card_at(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = card_at(device) && card_at(device)->used;
    return card_at(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    Card *card = card_at(device);
    if (!card)
        return CUDA_ERROR_INVALID_DEVICE;
    card->used = true;
    *context = (CUcontext)card;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)current_card();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context)
        current = ((Card *)context)->number;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (pushes == sizeof pushed / sizeof *pushed)
        return CUDA_ERROR_INVALID_VALUE;
    pushed[pushes++] = (CUcontext)current_card();
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!pushes)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = (CUcontext)current_card();
    return cuCtxSetCurrent(pushed[--pushes]);
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return CUDA_SUCCESS;
}

// ---- the table of the driver's functions

static CUresult not_pretended(void) {
    return (CUresult)fault(current_card(), cudaErrorNotSupported, "not pretended", "a function of the driver");
}

CUresult cuGetProcAddress_v2(
    const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found
) {
    char newer[200];
    snprintf(newer, sizeof newer, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function)
        *function = dlsym(RTLD_DEFAULT, newer);
    if (found)
        *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found
) {
    // torch fetches a table of functions at once, of which it calls few, and wants every one to be there.
    if (cuGetProcAddress_v2(symbol, function, (int)version, flags, NULL) != CUDA_SUCCESS)
        *function = (void *)not_pretended;
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
