// The log, the counters, errors and their names, and the one lock of the driver.
#include "card.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_LINE 8192  // some names of ATen's kernels have thousands of letters

typedef struct {
    char *text;
    size_t used;
    size_t room;
} Text;

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Text log_text;
static Text fault_text;  // all faults since the process began, whether or not a log is written
static bool logging;
static __thread cudaError_t last_error;

int lock(void) {
    return pthread_mutex_lock(&mutex);
}

void unlock(int *held UNUSED) {
    pthread_mutex_unlock(&mutex);
}

static void append(Text *text, const char *line) {
    size_t length = strlen(line);
    if (text->room - text->used < length + 2) {
        text->room = text->room * 2 + 2 * LONGEST_LINE;
        text->text = realloc(text->text, text->room);
    }
    memcpy(text->text + text->used, line, length);
    text->used += length;
    text->text[text->used++] = '\n';
    text->text[text->used] = 0;
}

void note(const char *format, ...) {
    LOCKED;
    if (!logging)
        return;
    char line[LONGEST_LINE];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    append(&log_text, line);
}

cudaError_t fault(Card *card, cudaError_t error, const char *rule, const char *format, ...) {
    LOCKED;
    char what[LONGEST_LINE / 2];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    char line[LONGEST_LINE];
    snprintf(line, sizeof line, "fault\trule=%s\terror=%d\tcard=%d\twhat=%s", rule, error, card->number, what);
    card->counts.faults++;
    append(&fault_text, line);
    if (logging)
        append(&log_text, line);
    return error;
}

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

// ---- names of errors, which are the same numbers in the runtime and the driver

typedef struct {
    int error;
    const char *name;
    const char *meaning;
} Name;

static const Name names[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {705, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

static const Name *name_of(int error) {
    static const Name unknown = {-1, "cudaErrorUnknown", "unrecognized error code"};
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
        if (names[i].error == error)
            return &names[i];
    return &unknown;
}

const char *cudaGetErrorString(cudaError_t error) {
    return name_of(error)->meaning;
}

const char *cudaGetErrorName(cudaError_t error) {
    return name_of(error)->name;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = name_of((int)error)->meaning;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = name_of((int)error)->name;
    return CUDA_SUCCESS;
}

// ---- controls

// 1: forgets what was logged and begins anew; 0: stops, and card_text stays as it is.
API void card_log(int on) {
    LOCKED;
    logging = on;
    if (on)
        log_text.used = 0;
}

API const char *card_text(void) {
    LOCKED;
    return log_text.used ? log_text.text : "";
}

API const char *card_faults(void) {
    LOCKED;
    return fault_text.used ? fault_text.text : "";
}

API void card_counts(int card, Counts *counts) {
    LOCKED;
    *counts = card_at(card)->counts;
}
