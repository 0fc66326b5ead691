// Modules and functions of the driver: Triton's kernels, whose cubins say what they need.
//
// A cubin is an ELF file. A kernel NAME has its code in `.text.NAME`, its shared memory in `.nv.shared.NAME`, and the
// attributes of all kernels and its own in `.nv.info` and `.nv.info.NAME` (as cuobjdump --dump-elf shows them).
#include "card.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARED_OF_THE_SYSTEM 1024  // bytes in `.nv.shared.NAME` since sm_90
#define MOST_PARAMETERS 256

// A module is the cubin itself; `code` is NULL for what is none, PTX for example.
typedef struct {
    char *code;
} Module;

typedef struct {
    char name[512];
    int registers;
    int stack_bytes;
    size_t own_shared_bytes;
    size_t most_shared_bytes;
    unsigned parameters;
    bool eight_bytes[MOST_PARAMETERS];  // parameters that may be pointers
} Function;

// An attribute: a format, a code, the length of what follows or a short value itself.
typedef struct {
    uint8_t format;
    uint8_t code;
    uint16_t length;
} Attribute;

enum { HAS_BYTES = 4 };  // the format whose length counts
enum { STACK_FRAME = 0x11, PARAMETER = 0x17, REGISTER_COUNT = 0x2f };

// ---- sections of a cubin

static const Elf64_Shdr *section(const char *code, const char *name) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)code;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(code + header->e_shoff);
    const char *names = code + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; ++i)
        if (strcmp(names + sections[i].sh_name, name) == 0)
            return &sections[i];
    return NULL;
}

static const Elf64_Shdr *section_of(const char *code, const char *prefix, const char *name) {
    char full[640];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    return section(code, full);
}

static size_t bytes_of_elf(const char *code) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)code;
    size_t sections = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    return sections > programs ? sections : programs;
}

// ---- what a kernel needs

static void read_attribute(Function *function, uint32_t symbol, const Attribute *attribute) {
    const uint32_t *words = (const uint32_t *)(attribute + 1);
    switch (attribute->code) {
    case REGISTER_COUNT:
        if (words[0] == symbol)
            function->registers = (int)words[1];
        break;
    case STACK_FRAME:
        if (words[0] == symbol)
            function->stack_bytes = (int)words[1];
        break;
    case PARAMETER: {
        // Words: an index, the parameter's number and its place, flags and its size.
        unsigned parameter = words[1] & 0xffff;
        if (parameter >= MOST_PARAMETERS)
            break;
        function->eight_bytes[parameter] = words[2] >> 18 == 8;
        if (function->parameters <= parameter)
            function->parameters = parameter + 1;
        break;
    }
    default:
        break;
    }
}

static void read_attributes(Function *function, const char *code, uint32_t symbol, const Elf64_Shdr *in) {
    size_t at = 0;
    while (in && at + sizeof(Attribute) <= in->sh_size) {
        const Attribute *attribute = (const Attribute *)(code + in->sh_offset + at);
        bool has_bytes = attribute->format == HAS_BYTES;
        if (has_bytes)
            read_attribute(function, symbol, attribute);
        at += sizeof *attribute + (has_bytes ? attribute->length : 0);
    }
}

static bool read_needs(Function *function, const char *code) {
    const Elf64_Shdr *text = section_of(code, ".text.", function->name);
    if (!text)
        return false;
    uint32_t symbol = text->sh_info & 0xffffff;
    read_attributes(function, code, symbol, section(code, ".nv.info"));
    read_attributes(function, code, symbol, section_of(code, ".nv.info.", function->name));
    const Elf64_Shdr *shared = section_of(code, ".nv.shared.", function->name);
    size_t bytes = shared ? shared->sh_size : 0;
    size_t reserved = model.sm >= 90 ? SHARED_OF_THE_SYSTEM : 0;
    function->own_shared_bytes = bytes > reserved ? bytes - reserved : 0;
    return true;
}

// ---- modules

CUresult cuModuleLoadData(CUmodule *made, const void *code) {
    CUresult error = (CUresult)unsafe("cuModuleLoadData");
    if (error)
        return error;
    Module *module = calloc(1, sizeof *module);
    *made = (CUmodule)module;
    if (memcmp(code, ELFMAG, SELFMAG) != 0)
        return CUDA_SUCCESS;
    size_t bytes = bytes_of_elf(code);
    module->code = malloc(bytes);
    memcpy(module->code, code, bytes);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(
    CUmodule *made, const void *code, unsigned options, CUjit_option *option, void **option_value
) {
    return cuModuleLoadData(made, code);
}

CUresult cuModuleLoad(CUmodule *made, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    size_t bytes = (size_t)ftell(file);
    rewind(file);
    char *code = calloc(1, bytes + 1);
    bool whole = fread(code, 1, bytes, file) == bytes;
    fclose(file);
    CUresult error = whole ? cuModuleLoadData(made, code) : CUDA_ERROR_FILE_NOT_FOUND;
    free(code);
    return error;
}

CUresult cuModuleUnload(CUmodule handle) {
    Module *module = (Module *)handle;
    free(module->code);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *made, CUmodule handle, const char *name) {
    Module *module = (Module *)handle;
    Function *function = calloc(1, sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    function->registers = UNKNOWN_REGISTERS;
    *made = (CUfunction)function;
    if (module->code && !read_needs(function, module->code))
        return CUDA_ERROR_NOT_FOUND;
    function->most_shared_bytes = SHARED_UNASKED - function->own_shared_bytes;
    return CUDA_SUCCESS;
}

// ---- functions

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    Function *function = (Function *)handle;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = function->registers;
        break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = function->stack_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = (int)function->own_shared_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = most_threads(function->registers);
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    Function *function = (Function *)handle;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_SUCCESS;
    if ((size_t)value + function->own_shared_bytes > most_shared_bytes())
        return CUDA_ERROR_INVALID_VALUE;
    function->most_shared_bytes = (size_t)value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache preferred) {
    return CUDA_SUCCESS;
}

// A parameter that is the address of another card's memory would stop a kernel of this one.
static cudaError_t parameters_in_reach(const Function *function, void **parameters, Card *card) {
    for (unsigned i = 0; i < function->parameters && parameters; ++i) {
        if (!function->eight_bytes[i])
            continue;
        Block block = block_of(*(void **)parameters[i]);
        if (block.home == DEVICE && within_reach(card, *(void **)parameters[i], function->name))
            return cudaErrorIllegalAddress;
    }
    return cudaSuccess;
}

static CUresult launch_function(
    CUfunction handle, dim3 grid, dim3 block, unsigned shared_bytes, CUstream stream, void **parameters
) {
    const Function *function = (const Function *)handle;
    Launch launch = {
        .library = "triton",
        .name = function->name,
        .grid = grid,
        .block = block,
        .shared_bytes = shared_bytes,
        .most_shared_bytes = function->most_shared_bytes,
        .registers = function->registers,
    };
    cudaError_t error = parameters_in_reach(function, parameters, current_card());
    return (CUresult)(error ? error : launch_kernel(&launch, stream, true));
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra
) {
    dim3 grid = {grid_x, grid_y, grid_z};
    dim3 block = {block_x, block_y, block_z};
    return launch_function(function, grid, block, shared_bytes, stream, parameters);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *is, CUfunction function, void **parameters, void **extra) {
    dim3 grid = {is->gridDimX, is->gridDimY, is->gridDimZ};
    dim3 block = {is->blockDimX, is->blockDimY, is->blockDimZ};
    return launch_function(function, grid, block, is->sharedMemBytes, is->hStream, parameters);
}

CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters
) {
    dim3 grid = {grid_x, grid_y, grid_z};
    dim3 block = {block_x, block_y, block_z};
    return launch_function(function, grid, block, shared_bytes, stream, parameters);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    *blocks = 2;  // plausible
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *is) {
    *clusters = 8;  // plausible
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill
) {
    return CUDA_SUCCESS;  // only kernels read it
}
