// Streams and events, what waits for what, and the hook by which somebody else makes all this asynchronous.
//
// The driver does everything at once and in the order in which it is called, so that each wait is over when it begins.
// A hook may do the work itself, later: it is told of every moment that orders work, before the moment takes effect.
#include "card.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define SHORTEST_MS 5.0f  // between two events: a program that measures kernels divides by it

Stream *streams;
static Hook hook;
static __thread Stream *of_thread[MOST_CARDS];  // cudaStreamPerThread

API void card_hook(Hook told) {
    __atomic_store_n(&hook, told, __ATOMIC_SEQ_CST);
}

int tell(Moment moment, const Stream *stream, const void *event_or_stream) {
    Hook told = __atomic_load_n(&hook, __ATOMIC_SEQ_CST);
    void *handle = stream ? handle_of(stream) : NULL;
    return told ? told((int)moment, handle, (void *)event_or_stream) : 0;
}

// ---- streams

bool blocking(const Stream *stream) {
    return !(stream->flags & cudaStreamNonBlocking);
}

void *handle_of(const Stream *stream) {
    return stream == &stream->card->legacy ? NULL : (void *)stream;
}

Where where(const Stream *stream) {
    Where is;
    const char *place = stream->capture ? "captured" : any_capture() ? "beside" : "-";
    unsigned long handle = (unsigned long)handle_of(stream);
    snprintf(is.text, sizeof is.text, "stream=%#lx\tcard=%d\tplace=%s", handle, stream->card->number, place);
    return is;
}

static Stream *new_stream(unsigned flags, int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->card = current_card();
    stream->flags = flags;
    stream->priority = priority;
    LOCKED;
    // It need not wait for what the default stream has done before.
    stream->to_legacy = stream->card->legacy.work;
    stream->next = streams;
    streams = stream;
    return stream;
}

static Stream *stream_of_thread(void) {
    Stream **stream = &of_thread[current_card()->number];
    if (!*stream)
        *stream = new_stream(cudaStreamDefault, 0);
    return *stream;
}

Stream *stream_of(void *handle, const char *call) {
    if (handle == NULL || handle == cudaStreamLegacy)
        return &current_card()->legacy;
    if (handle == cudaStreamPerThread)
        return stream_of_thread();
    Stream *stream = handle;
    if (!stream->destroyed)
        return stream;
    fault(stream->card, cudaErrorInvalidResourceHandle, "destroyed stream", "%s on %p", call, handle);
    return NULL;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    *handle = (cudaStream_t)new_stream(flags, priority);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Stream *stream = stream_of(handle, "cudaStreamDestroy");
    if (!stream || !handle_of(stream))
        return failed(cudaErrorInvalidResourceHandle);
    stream->destroyed = true;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    Stream *stream = stream_of(handle, "cudaStreamGetPriority");
    if (!stream)
        return failed(cudaErrorInvalidResourceHandle);
    *priority = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

// ---- the default stream: it waits for all blocking streams of its card before it does anything, and they for it

// One stream that this one has to wait for and does not yet; it counts as waited for from now on.
static Stream *next_to_join(Stream *stream) {
    LOCKED;
    Stream *legacy = &stream->card->legacy;
    if (stream != legacy) {
        if (!blocking(stream) || stream->to_legacy == legacy->work)
            return NULL;
        stream->to_legacy = legacy->work;
        return legacy;
    }
    for (Stream *other = streams; other; other = other->next) {
        if (other->card != stream->card || !blocking(other) || other->legacy_to == other->work)
            continue;
        other->legacy_to = other->work;
        return other;
    }
    return NULL;
}

cudaError_t enter(Stream *stream, const char *call) {
    cudaError_t error = may_act(stream, call);
    if (error)
        return error;
    for (Stream *other = next_to_join(stream); other; other = next_to_join(stream))
        tell(STREAM_JOINS, stream, handle_of(other));
    return cudaSuccess;
}

cudaError_t work_on(Stream *stream, const char *call) {
    cudaError_t error = enter(stream, call);
    if (error)
        return error;
    LOCKED;
    if (stream->capture)
        add_node(stream);
    else
        stream->work++;
    return cudaSuccess;
}

// ---- the host waits for a stream or a card, or asks

static cudaError_t ask_stream(cudaStream_t handle, const char *call, Stream **stream) {
    *stream = stream_of(handle, call);
    if (!*stream)
        return cudaErrorInvalidResourceHandle;
    if ((*stream)->capture)
        return invalidated((*stream)->capture, cudaErrorStreamCaptureUnsupported, call);
    cudaError_t error = unsafe(call);
    return error ? error : enter(*stream, call);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Stream *stream;
    cudaError_t error = ask_stream(handle, "cudaStreamQuery", &stream);
    if (!error && tell(STREAM_QUERIED, stream, NULL))
        error = cudaErrorNotReady;
    return failed(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream *stream;
    cudaError_t error = ask_stream(handle, "cudaStreamSynchronize", &stream);
    if (error)
        return failed(error);
    note("wait\twhat=stream\tevent=0\t%s", where(stream).text);
    tell(STREAM_SYNCHRONIZED, stream, NULL);
    LOCKED;
    stream->card->counts.stream_waits++;
    return cudaSuccess;
}

CUresult cuStreamSynchronize(CUstream handle) {
    return (CUresult)cudaStreamSynchronize(handle);
}

cudaError_t cudaDeviceSynchronize(void) {
    Card *card = current_card();
    cudaError_t error = unsafe("cudaDeviceSynchronize");
    if (error)
        return failed(error);
    note("wait\twhat=device\tevent=0\t%s", where(&card->legacy).text);
    tell(DEVICE_SYNCHRONIZED, NULL, NULL);
    LOCKED;
    card->counts.device_waits++;
    return cudaSuccess;
}

// ---- host functions

static cudaError_t begin_host_function(cudaStream_t handle, const char *call, Stream **stream) {
    *stream = stream_of(handle, call);
    if (!*stream)
        return cudaErrorInvalidResourceHandle;
    cudaError_t error = work_on(*stream, call);
    if (error)
        return error;
    note("host_function\t%s", where(*stream).text);
    tell(HOST_FUNCTION, *stream, NULL);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
    Stream *stream;
    cudaError_t error = begin_host_function(handle, "cudaLaunchHostFunc", &stream);
    if (!error && !stream->capture)
        function(data);
    return failed(error);
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *data, unsigned flags) {
    Stream *stream = stream_of(handle, "cudaStreamAddCallback");
    if (stream && stream->capture)
        return failed(invalidated(stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback"));
    cudaError_t error = begin_host_function(handle, "cudaStreamAddCallback", &stream);
    if (!error)
        function(handle, cudaSuccess, data);
    return failed(error);
}

// ---- events

static Event *event_of(cudaEvent_t handle, const char *call) {
    Event *event = (Event *)handle;
    if (!event || !event->destroyed)
        return event;
    fault(event->card, cudaErrorInvalidResourceHandle, "destroyed event", "%s of %p", call, (void *)event);
    return NULL;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    Event *event = calloc(1, sizeof *event);
    event->card = current_card();
    event->flags = flags;
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) {
    return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Event *event = event_of(handle, "cudaEventDestroy");
    if (!event)
        return failed(cudaErrorInvalidResourceHandle);
    event->destroyed = true;  // never freed, so that its use afterwards is seen
    return cudaSuccess;
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned flags) {
    const char *call = "cudaEventRecord";
    Event *event = event_of(event_handle, call);
    Stream *stream = stream_of(stream_handle, call);
    if (!event || !stream)
        return failed(cudaErrorInvalidResourceHandle);
    if (event->card != stream->card)
        return failed(fault(
            stream->card, cudaErrorInvalidResourceHandle, "wrong card", "%s of an event of card %d", call,
            event->card->number
        ));
    cudaError_t error = enter(stream, call);
    if (error)
        return failed(error);
    note("record\tevent=%#lx\t%s", (unsigned long)event, where(stream).text);
    tell(EVENT_RECORDED, stream, event);
    LOCKED;
    event->recorded = true;
    event->at_ms = now_ms();
    record_in_capture(stream, event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned flags) {
    const char *call = "cudaStreamWaitEvent";
    Event *event = event_of(event_handle, call);
    Stream *stream = stream_of(stream_handle, call);
    if (!event || !stream)
        return failed(cudaErrorInvalidResourceHandle);
    cudaError_t error = may_wait(stream, event);
    if (!error)
        error = enter(stream, call);
    if (error)
        return failed(error);
    note("stream_wait\tevent=%#lx\t%s", (unsigned long)event, where(stream).text);
    tell(STREAM_WAITS, stream, event);
    LOCKED;
    if (event->capture)
        wait_in_capture(stream, event);
    else if (!stream->capture)
        stream->work++;  // who waits for the stream waits for the event, too
    return cudaSuccess;
}

static cudaError_t ask_event(cudaEvent_t handle, const char *call, Event **event) {
    *event = event_of(handle, call);
    if (!*event)
        return cudaErrorInvalidResourceHandle;
    cudaError_t error = may_ask(*event, call);
    return error ? error : unsafe(call);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event *event;
    cudaError_t error = ask_event(handle, "cudaEventQuery", &event);
    if (!error && tell(EVENT_QUERIED, NULL, event))
        error = cudaErrorNotReady;
    return failed(error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Event *event;
    cudaError_t error = ask_event(handle, "cudaEventSynchronize", &event);
    if (error)
        return failed(error);
    note("wait\twhat=event\tevent=%#lx\t%s", (unsigned long)event, where(&event->card->legacy).text);
    tell(EVENT_SYNCHRONIZED, NULL, event);
    LOCKED;
    event->card->counts.event_waits++;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
    const char *call = "cudaEventElapsedTime";
    Event *begin = event_of(begin_handle, call);
    Event *end = event_of(end_handle, call);
    if (!begin || !end || !begin->recorded || !end->recorded)
        return failed(cudaErrorInvalidResourceHandle);
    if ((begin->flags | end->flags) & cudaEventDisableTiming || begin->card != end->card)
        return failed(fault(end->card, cudaErrorInvalidResourceHandle, "no time between the events", "%s", call));
    if (may_ask(begin, call) || may_ask(end, call))
        return failed(cudaErrorCapturedEvent);
    if (tell(EVENT_QUERIED, NULL, end))
        return failed(cudaErrorNotReady);
    float between = (float)(end->at_ms - begin->at_ms);
    *ms = between > SHORTEST_MS ? between : SHORTEST_MS;
    return cudaSuccess;
}
