// In which order the work of streams may be done, if it is not done at once: a hook (card.h) for order.py.
//
// Work is done by Python, which asks here what may be done next. A stream counts the pieces of work that it was given
// and those that were done. An event is a place in a stream: it has happened when so many pieces are done, and what the
// stream had to wait for since its last piece. A wait for an event is a barrier in the waiting stream: its later work may
// not begin before the event has happened.
//
// This is C, with a lock of its own, because torch's allocator records and queries events while it holds a lock: code in
// Python would wait there for Python's lock, whose holder may wait for the allocator's. Only calls for which the host
// waits call Python.
#include "card.h"

#include <stdlib.h>

#define BUCKETS 4096

typedef struct Queue Queue;

typedef struct Barrier {
    uint64_t at;      // work of the stream from this piece on waits ...
    Queue *other;     // ... until so many pieces of the other stream are done
    uint64_t number;
    struct Barrier *next;
} Barrier;  // also what an event or the host waits for: then only the other stream and its number

struct Queue {
    void *stream;
    uint64_t given;
    uint64_t done;
    Barrier *barriers;
    Queue *next;
};

typedef struct Place {
    void *event;
    Barrier *before;  // what is done when it has happened
    struct Place *next;
} Place;

API void card_hook(Hook told);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Queue *queues;
static Place *places[BUCKETS];
static uint64_t waits, ignored;  // how many waits there were, and which one is left out: a planted fault
// Does what the host waits for: of a stream, until so many pieces are done; of all streams, all, if it is NULL.
static void (*until)(void *stream, uint64_t number);

#define DEFAULT_STREAM ((void *)1)  // a name of the default stream; NULL would be all streams

static Queue *queue_of(void *stream) {
    stream = stream ? stream : DEFAULT_STREAM;
    for (Queue *queue = queues; queue; queue = queue->next)
        if (queue->stream == stream)
            return queue;
    Queue *queue = calloc(1, sizeof *queue);
    queue->stream = stream;
    queue->next = queues;
    return queues = queue;
}

static Place *place_of(void *event) {
    Place **first = &places[((uintptr_t)event >> 4) % BUCKETS];
    for (Place *place = *first; place; place = place->next)
        if (place->event == event)
            return place;
    Place *place = calloc(1, sizeof *place);
    place->event = event;
    place->next = *first;
    return *first = place;
}

static Barrier *with(Barrier *next, uint64_t at, Queue *other, uint64_t number) {
    Barrier *barrier = calloc(1, sizeof *barrier);
    *barrier = (Barrier){at, other, number, next};
    return barrier;
}

static void drop(Barrier *barrier) {
    while (barrier) {
        Barrier *next = barrier->next;
        free(barrier);
        barrier = next;
    }
}

static Barrier *copied(const Barrier *barrier) {
    Barrier *copy = NULL;
    for (; barrier; barrier = barrier->next)
        copy = with(copy, barrier->at, barrier->other, barrier->number);
    return copy;
}

// What is done before anything that the stream is given next.
static Barrier *all_of(Queue *queue) {
    Barrier *before = with(NULL, 0, queue, queue->given);
    for (const Barrier *barrier = queue->barriers; barrier; barrier = barrier->next)
        if (barrier->at == queue->given)
            before = with(before, 0, barrier->other, barrier->number);
    return before;
}

static bool happened(const Barrier *before) {
    for (; before; before = before->next)
        if (before->other->done < before->number)
            return false;
    return true;
}

// Whether this wait, which has something to wait for, is the one that is left out.
static bool left_out(void) {
    return ++waits == ignored;
}

// Forget the barriers that nothing waits for any more.
static void drop_passed(Queue *queue) {
    for (Barrier **barrier = &queue->barriers; *barrier;) {
        Barrier *old = *barrier;
        if (old->at >= queue->done && old->other->done < old->number) {
            barrier = &old->next;
            continue;
        }
        *barrier = old->next;
        free(old);
    }
}

static void bar(Queue *queue, const Barrier *before) {
    if (happened(before) || left_out())
        return;
    drop_passed(queue);
    for (; before; before = before->next)
        queue->barriers = with(queue->barriers, queue->given, before->other, before->number);
}

static bool blocked(const Queue *queue) {
    for (const Barrier *barrier = queue->barriers; barrier; barrier = barrier->next)
        if (barrier->at <= queue->done && barrier->other->done < barrier->number)
            return true;
    return false;
}

static int ordered(int moment, void *stream, void *other) {
    bool busy = false;
    Barrier *before = NULL, *awaited = NULL;
    pthread_mutex_lock(&mutex);
    Queue *queue = queue_of(stream);
    Place *place = moment == STREAM_JOINS ? NULL : place_of(other);
    switch (moment) {
    case EVENT_RECORDED:
        drop(place->before);
        place->before = all_of(queue);
        break;
    case STREAM_WAITS: bar(queue, place->before); break;
    case STREAM_JOINS: bar(queue, before = all_of(queue_of(other))); break;
    case EVENT_QUERIED: busy = !happened(place->before); break;
    case STREAM_QUERIED: busy = !happened(before = all_of(queue)); break;
    case EVENT_SYNCHRONIZED:
        if (!happened(place->before) && !left_out())
            awaited = copied(place->before);
        break;
    case STREAM_SYNCHRONIZED:
    case COPIED:
    case HOST_FUNCTION: awaited = all_of(queue); break;
    default: break;
    }
    pthread_mutex_unlock(&mutex);
    for (const Barrier *each = awaited; each; each = each->next)
        until(each->other->stream, each->number);
    drop(before);
    drop(awaited);
    if (moment == DEVICE_SYNCHRONIZED)
        until(NULL, 0);
    return busy;
}

// From now on work is done when something waits for it, by the function; NULL: at once.
API void card_defer(void (*function)(void *, uint64_t)) {
    until = function;
    card_hook(function ? ordered : NULL);
}

// The wait of this number from now on (1, 2, ...), of a stream or of the host for an event, does not wait; 0: none.
API void card_ignore_wait(uint64_t number) {
    pthread_mutex_lock(&mutex);
    ignored = number;
    waits = 0;
    pthread_mutex_unlock(&mutex);
}

// How many waits there were since then, of those that had something to wait for.
API uint64_t card_waits(void) {
    return waits;
}

// A stream is given a piece of work.
API void card_given(void *stream) {
    pthread_mutex_lock(&mutex);
    queue_of(stream)->given++;
    pthread_mutex_unlock(&mutex);
}

// Whether a stream's next piece of work may be done.
API int card_ready(void *stream) {
    pthread_mutex_lock(&mutex);
    Queue *queue = queue_of(stream);
    bool ready = queue->done < queue->given && !blocked(queue);
    pthread_mutex_unlock(&mutex);
    return ready;
}

// A stream's next piece of work was done.
API void card_did(void *stream) {
    pthread_mutex_lock(&mutex);
    Queue *queue = queue_of(stream);
    queue->done++;
    drop_passed(queue);
    pthread_mutex_unlock(&mutex);
}

API uint64_t card_done_by(void *stream) {
    pthread_mutex_lock(&mutex);
    uint64_t done = queue_of(stream)->done;
    pthread_mutex_unlock(&mutex);
    return done;
}
