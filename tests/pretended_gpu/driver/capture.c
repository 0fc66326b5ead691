// Capture of streams into CUDA graphs: what belongs to a capture, what is forbidden meanwhile, and what it leaves open.
//
// A graph is only a number of nodes here: nothing is done when it is launched, except that the launch is written down.
// The rules are those of the CUDA C++ programming guide, "Creating a graph using stream capture", and of the comment on
// cudaThreadExchangeStreamCaptureMode in the runtime's header.
#include "card.h"

#include <stdio.h>
#include <stdlib.h>

static Capture *captures;  // those under way
static uint64_t captures_so_far;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool any_capture(void) {
    LOCKED;
    return captures != NULL;
}

// ---- what is refused

cudaError_t invalidated(Capture *capture, cudaError_t error, const char *call) {
    LOCKED;
    capture->invalid = true;
    return fault(capture->origin->card, error, "in a capture", "%s", call);
}

// Whether the capture forbids this thread the calls that may be unsafe.
static bool forbids(const Capture *capture) {
    bool mine = pthread_equal(capture->thread, pthread_self());
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return false;
    if (mine)
        return capture->mode != cudaStreamCaptureModeRelaxed;
    return thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t unsafe(const char *call) {
    LOCKED;
    cudaError_t error = cudaSuccess;
    for (Capture *capture = captures; capture; capture = capture->next)
        if (forbids(capture))
            error = invalidated(capture, cudaErrorStreamCaptureUnsupported, call);
    return error;
}

// The capture of a blocking stream of the card, for which its legacy stream would have to wait.
static Capture *capture_of_blocking(const Card *card) {
    LOCKED;
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->card == card && stream->capture && blocking(stream))
            return stream->capture;
    return NULL;
}

cudaError_t may_act(const Stream *stream, const char *call) {
    if (stream->capture && stream->capture->invalid)
        return fault(stream->card, cudaErrorStreamCaptureInvalidated, "in an invalid capture", "%s", call);
    Capture *implied = handle_of(stream) ? NULL : capture_of_blocking(stream->card);
    return implied ? invalidated(implied, cudaErrorStreamCaptureImplicit, call) : cudaSuccess;
}

cudaError_t may_wait(const Stream *stream, const Event *event) {
    Capture *capture = event->capture;
    if (!capture) {
        if (!stream->capture || !event->recorded)
            return cudaSuccess;
        const char *what = "wait for an event outside of the capture";
        return invalidated(stream->capture, cudaErrorStreamCaptureIsolation, what);
    }
    if (capture->ended)
        return fault(event->card, cudaErrorCapturedEvent, "after a capture", "wait for an event of the capture");
    if (capture->invalid)
        return fault(event->card, cudaErrorStreamCaptureInvalidated, "in an invalid capture", "cudaStreamWaitEvent");
    if (!handle_of(stream))
        return invalidated(capture, cudaErrorStreamCaptureImplicit, "wait of the legacy stream");
    if (!stream->capture || stream->capture == capture)
        return cudaSuccess;
    invalidated(stream->capture, cudaErrorStreamCaptureMerge, "wait for an event of another capture");
    return invalidated(capture, cudaErrorStreamCaptureMerge, "wait of another capture for an event of this one");
}

cudaError_t may_ask(const Event *event, const char *call) {
    if (!event->capture)
        return cudaSuccess;
    if (event->capture->ended)
        return fault(event->card, cudaErrorCapturedEvent, "after a capture", "%s of an event of the capture", call);
    return invalidated(event->capture, cudaErrorCapturedEvent, call);
}

// ---- what belongs to a capture, and what comes before what in it

static void belong_to(Stream *stream, Capture *capture) {
    if (capture->branches == MOST_BRANCHES) {
        fprintf(stderr, "the pretended driver: a capture has more than %d streams\n", MOST_BRANCHES);
        abort();
    }
    stream->capture = capture;
    stream->branch = capture->branches++;
    stream->past = (Past){{0}};
}

void add_node(Stream *stream) {
    stream->capture->nodes++;
    stream->past.done[stream->branch]++;
}

void record_in_capture(const Stream *stream, Event *event) {
    event->capture = stream->capture;
    event->past = stream->past;
}

void wait_in_capture(Stream *stream, const Event *event) {
    if (!stream->capture)
        belong_to(stream, event->capture);
    for (int i = 0; i < MOST_BRANCHES; ++i)
        if (stream->past.done[i] < event->past.done[i])
            stream->past.done[i] = event->past.done[i];
}

// ---- begin and end

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    const char *call = "cudaStreamBeginCapture";
    Stream *stream = stream_of(handle, call);
    if (!stream)
        return failed(cudaErrorInvalidResourceHandle);
    if (!handle_of(stream))
        return failed(fault(
            stream->card, cudaErrorStreamCaptureUnsupported, "in a capture", "%s on the default stream", call
        ));
    if (stream->capture)
        return failed(invalidated(stream->capture, cudaErrorInvalidValue, call));
    LOCKED;
    Capture *capture = calloc(1, sizeof *capture);
    capture->number = ++captures_so_far;
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    belong_to(stream, capture);
    note("capture\twhat=begin\tmode=%d\tnodes=0\tresult=ok\t%s", mode, where(stream).text);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges,
    size_t number, enum cudaStreamCaptureMode mode
) {
    return cudaStreamBeginCapture(stream, mode);
}

// Takes all streams out of the capture; returns whether one of them has work that the origin does not wait for.
static bool leave(Capture *capture) {
    bool unjoined = false;
    const Past *joined = &capture->origin->past;
    for (Stream *stream = streams; stream; stream = stream->next) {
        if (stream->capture != capture)
            continue;
        unjoined |= stream->past.done[stream->branch] > joined->done[stream->branch];
        stream->capture = NULL;
    }
    return unjoined;
}

static void take_from_list(Capture *capture) {
    Capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    capture->ended = true;
}

static cudaError_t may_end(const Stream *stream) {
    Capture *capture = stream->capture;
    const char *call = "cudaStreamEndCapture";
    if (!capture)
        return fault(stream->card, cudaErrorInvalidValue, "no capture", "%s", call);
    if (capture->origin != stream)
        return invalidated(capture, cudaErrorStreamCaptureUnmatched, call);
    if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self()))
        return invalidated(capture, cudaErrorStreamCaptureWrongThread, call);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Stream *stream = stream_of(handle, "cudaStreamEndCapture");
    *graph = NULL;
    if (!stream)
        return failed(cudaErrorInvalidResourceHandle);
    LOCKED;
    cudaError_t error = may_end(stream);
    if (error)
        return failed(error);
    Capture *capture = stream->capture;
    bool unjoined = leave(capture);
    take_from_list(capture);
    const char *result = capture->invalid ? "invalid" : unjoined ? "unjoined" : "ok";
    note("capture\twhat=end\tmode=%d\tnodes=%zu\tresult=%s\t%s", capture->mode, capture->nodes, result,
         where(stream).text);
    if (capture->invalid)
        return failed(cudaErrorStreamCaptureInvalidated);
    if (unjoined)
        return failed(fault(stream->card, cudaErrorStreamCaptureUnjoined, "unjoined", "cudaStreamEndCapture"));
    *graph = (cudaGraph_t)capture;
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(const Capture *capture) {
    if (!capture)
        return cudaStreamCaptureStatusNone;
    return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    return cudaStreamGetCaptureInfo(handle, status, NULL, NULL, NULL, NULL, NULL);
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *number, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *dependencies_number
) {
    Stream *stream = stream_of(handle, "cudaStreamGetCaptureInfo");
    if (!stream)
        return failed(cudaErrorInvalidResourceHandle);
    // Of the legacy stream nothing can be said meanwhile, but asking does no harm to the capture.
    if (!handle_of(stream) && capture_of_blocking(stream->card))
        return failed(cudaErrorStreamCaptureImplicit);
    *status = status_of(stream->capture);
    if (number)
        *number = stream->capture ? stream->capture->number : 0;
    if (graph)
        *graph = (cudaGraph_t)stream->capture;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (dependencies_number)
        *dependencies_number = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t stream, cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges, size_t number, unsigned flags
) {
    return cudaSuccess;
}

// ---- graphs; the graph that a capture has made is the capture itself, and so is what is instantiated from it

static size_t nodes_of(const void *graph) {
    return ((const Capture *)graph)->nodes;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = (cudaGraphExec_t)graph;
    return graph ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
    Stream *stream = stream_of(handle, "cudaGraphLaunch");
    if (!stream)
        return failed(cudaErrorInvalidResourceHandle);
    if (stream->capture)
        return failed(invalidated(stream->capture, cudaErrorStreamCaptureUnsupported, "cudaGraphLaunch"));
    cudaError_t error = work_on(stream, "cudaGraphLaunch");
    if (error)
        return failed(error);
    LOCKED;
    stream->card->counts.graph_launches++;
    note("graph_launch\tnodes=%zu\t%s", nodes_of(graph), where(stream).text);
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    *number = nodes_of(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    return cudaSuccess;
}
