// Kernels: what they are called, what a launch may ask for, and the log of those that were launched.
//
// A program's kernels register with the runtime when its libraries are loaded, by nvcc's calls of `__cuda` functions.
#include "card.h"

#include <stdlib.h>
#include <string.h>

#define DEEPEST 16  // launches whose arguments hold launches

typedef struct {
    const void *function;  // the host's function that launches it
    const char *name;
    size_t most_shared_bytes;
} Kernel;

static Kernel *kernels;
static size_t number;
static size_t room;
static bool sorted;

// ---- the kernels of the program's libraries

static int by_function(const void *one, const void *other) {
    uintptr_t a = (uintptr_t)((const Kernel *)one)->function;
    uintptr_t b = (uintptr_t)((const Kernel *)other)->function;
    return (a > b) - (a < b);
}

// NULL where no such kernel has registered. Whoever calls this holds the lock.
static Kernel *kernel_of(const void *function) {
    if (!sorted)
        qsort(kernels, number, sizeof *kernels, by_function);
    sorted = true;
    Kernel wanted = {.function = function};
    return bsearch(&wanted, kernels, number, sizeof *kernels, by_function);
}

API void __cudaRegisterFunction(
    void **library, const char *function, char *symbol, const char *name, int limit, void *thread, void *block,
    void *block_size, void *grid_size, int *warp_size
) {
    LOCKED;
    if (number == room) {
        room = room * 2 + 65536;
        kernels = realloc(kernels, room * sizeof *kernels);
    }
    kernels[number++] = (Kernel){function, name, SHARED_UNASKED};
    sorted = false;
}

API void **__cudaRegisterFatBinary(void *code) {
    static void *library[4];
    return library;
}

API void __cudaRegisterFatBinaryEnd(void **library) {
}

API void __cudaUnregisterFatBinary(void **library) {
}

API char __cudaInitModule(void **library) {
    return 1;
}

API void __cudaRegisterVar(
    void **library, char *variable, char *symbol, const char *name, int external, size_t bytes, int constant, int global
) {
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

// ---- what a launch may ask for

// Registers are given to whole warps, in steps of eight a thread.
static long registers_of_block(int registers, unsigned threads) {
    return (long)((registers + 7) / 8 * 8) * ((threads + 31) / 32 * 32);
}

int most_threads(int registers) {
    int threads = REGISTERS / (registers ? (registers + 7) / 8 * 8 : 8) / 32 * 32;
    return threads < 1024 ? threads : 1024;
}

static unsigned threads_of(const Launch *launch) {
    return launch->block.x * launch->block.y * launch->block.z;
}

static bool bad_grid(dim3 grid) {
    bool empty = !grid.x || !grid.y || !grid.z;
    return empty || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535;
}

static bool bad_block(dim3 block) {
    bool empty = !block.x || !block.y || !block.z;
    return empty || block.x > 1024 || block.y > 1024 || block.z > 64 || block.x * block.y * block.z > 1024;
}

// The limit that a launch exceeds, with its error; NULL where it is possible.
static const char *exceeded(const Launch *launch, cudaError_t *error) {
    *error = cudaErrorInvalidConfiguration;
    if (bad_grid(launch->grid))
        return "grid";
    if (bad_block(launch->block))
        return "threads";
    *error = cudaErrorInvalidValue;
    if (launch->shared_bytes > launch->most_shared_bytes)
        return "shared memory";
    *error = cudaErrorLaunchOutOfResources;
    if (registers_of_block(launch->registers, threads_of(launch)) > REGISTERS)
        return "registers";
    *error = cudaSuccess;
    return NULL;
}

static cudaError_t refused(const Launch *launch, Card *card, const char *limit, cudaError_t error) {
    return fault(
        card, error, "launch", "%s: grid %u,%u,%u threads %u shared %zu registers %d of %s", limit, launch->grid.x,
        launch->grid.y, launch->grid.z, threads_of(launch), launch->shared_bytes, launch->registers, launch->name
    );
}

cudaError_t launch_kernel(const Launch *launch, void *handle, bool by_driver) {
    Stream *stream = stream_of(handle, "a launch");
    if (!stream)
        return cudaErrorInvalidResourceHandle;
    if (stream->card != current_card())
        return fault(
            current_card(), cudaErrorInvalidResourceHandle, "wrong card", "a launch on a stream of card %d: %s",
            stream->card->number, launch->name
        );
    cudaError_t error;
    const char *limit = exceeded(launch, &error);
    // The driver has no error of its own for a configuration that cannot be.
    if (limit)
        return refused(launch, stream->card, limit, by_driver && error == 9 ? cudaErrorInvalidValue : error);
    error = work_on(stream, launch->name);
    if (error)
        return error;
    LOCKED;
    stream->card->counts.launches++;
    note(
        "launch\tlibrary=%s\tgrid=%u,%u,%u\tthreads=%u\tshared_bytes=%zu\t%s\tname=%s", launch->library,
        launch->grid.x, launch->grid.y, launch->grid.z, threads_of(launch), launch->shared_bytes, where(stream).text,
        launch->name
    );
    return cudaSuccess;
}

// For what is computed without the runtime: a launch in its name.
API void card_launch(const char *library, const char *name, void *stream) {
    Launch one = {.library = library, .name = name, .grid = {1, 1, 1}, .block = {1, 1, 1}};
    failed(launch_kernel(&one, stream, false));
}

// ---- launches of the program's kernels

static __thread struct {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    void *stream;
} configurations[DEEPEST];
static __thread int depth;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    if (depth == DEEPEST)
        return cudaErrorInvalidConfiguration;
    configurations[depth].grid = grid;
    configurations[depth].block = block;
    configurations[depth].shared_bytes = shared_bytes;
    configurations[depth++].stream = stream;
    return cudaSuccess;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    depth--;
    *grid = configurations[depth].grid;
    *block = configurations[depth].block;
    *shared_bytes = configurations[depth].shared_bytes;
    *(void **)stream = configurations[depth].stream;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    Launch one = {.library = "torch", .name = "?", .grid = grid, .block = block, .shared_bytes = shared_bytes};
    one.registers = UNKNOWN_REGISTERS;
    one.most_shared_bytes = SHARED_UNASKED;
    lock();
    Kernel *kernel = kernel_of(function);
    if (kernel) {
        one.name = kernel->name;
        one.most_shared_bytes = kernel->most_shared_bytes;
    }
    unlock(NULL);
    return failed(launch_kernel(&one, stream, false));
}

API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *is, const void *function, void **arguments) {
    return cudaLaunchKernel(function, is->gridDim, is->blockDim, arguments, is->dynamicSmemBytes, is->stream);
}

// ---- their attributes

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *are, const void *function) {
    memset(are, 0, sizeof *are);
    are->maxThreadsPerBlock = 1024;
    are->numRegs = UNKNOWN_REGISTERS;
    are->ptxVersion = are->binaryVersion = model.sm;
    are->maxDynamicSharedSizeBytes = (int)most_shared_bytes();
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value > (int)most_shared_bytes())
        return failed(cudaErrorInvalidValue);
    LOCKED;
    Kernel *kernel = kernel_of(function);
    if (kernel)
        kernel->most_shared_bytes = (size_t)value;
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(
    cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int card
) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared_bytes, unsigned flags
) {
    *blocks = 2;  // a plausible number, on which nothing depends but the grids of a few reductions
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)symbol;
    return cudaSuccess;
}
