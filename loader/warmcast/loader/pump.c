/* From the page cache to a GPU without the interpreter.
 *
 * A thread that streams reads a piece of a file into a slot of pinned memory, has it copied to its
 * places, and goes on with the next slot, tens of thousands of times a second. In Python each of
 * them has to have the interpreter's lock for that, and where processors are shared its holder may
 * be off the processor: all others wait. So this is what a thread does as long as all goes well.
 * Whatever does not, it leaves to Python at the piece where it is.
 *
 * Small slots stay in the processor's cache, but a copy engine needs some microseconds from one
 * copy to the next, as long as it takes for 200 kB. So copies are not begun one by one: all threads
 * hand them to one link, which begins those that have gathered as one batch, in which the engine
 * goes on at once, while the batch before is still under way.
 *
 * The GPU is five functions of the CUDA driver, so that this is built without CUDA.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#define LAYOUT 2 /* of what follows: pump.py has the same */

enum { HOST = 1, DEVICE = 2 };               /* CUmemorytype */
enum { IN_STREAM_ORDER = 1 };                /* CUmemcpySrcAccessOrder */
enum { OUT_OF_MEMORY = 2, NOT_READY = 600 }; /* CUresult */
enum { LATE = -1, STOPPED = -2 };            /* as if they were */

struct rows { /* CUDA_MEMCPY2D */
    size_t from_x, from_y;
    int from_kind;
    const void *from_host;
    uint64_t from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_kind;
    void *to_host;
    uint64_t to_device;
    void *to_array;
    size_t to_pitch, width, height;
};
struct attributes { /* CUmemcpyAttributes */
    int order;
    int from_kind, from_number, to_kind, to_number;
    unsigned flags;
};

struct gpu {
    int (*copy)(uint64_t to, const void *from, size_t nbytes, void *stream);
    int (*copy_rows)(const struct rows *, void *stream);
    int (*copy_all)(const uint64_t *to, const uint64_t *from, const size_t *nbytes, size_t count,
                    const struct attributes *, const size_t *attributes_from, size_t attributes,
                    size_t *failed, void *stream); /* NULL where the driver has no batches */
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
};

struct copy {
    int64_t to, at, width, pitch, rows;
};

/* Copies that are begun together: single ones, and those of several rows. */
struct batch {
    uint64_t *to, *from;
    size_t *nbytes;
    size_t count, room;
    struct rows *rows;
    size_t rows_count, rows_room;
    int64_t bytes;
};

/* A batch of this many bytes is worth its gap, and so many of them leave the others time to gather
 * the next. */
enum { ENOUGH = 8 << 20, UNDER_WAY = 3, EVENTS = UNDER_WAY + 1 };

/* One stream to a GPU, for all threads. Batches are numbered from 1. */
struct link {
    struct gpu gpu;
    void *stream;
    void *events[EVENTS]; /* behind a batch: that of its number, modulo EVENTS */
    pthread_mutex_t gathering, beginning;
    struct batch batches[2];          /* the one that gathers has the number taken + 1 */
    atomic_llong taken, begun, ended; /* the last batch of which that is so */
    atomic_int error;                 /* the first */
};

/* Bytes of a file that go to one place: of each row, `pitch` bytes after the last, the first
 * `width`, packed. */
struct comb {
    int64_t first, width, pitch, rows, to;
};
/* What one thread sends: a file's bytes, through slots of its own. */
struct lane {
    struct link *link;
    char *slots;
    int64_t slot_bytes, slot_count;
    int64_t *batches; /* of each slot that of the last copy from it */
    int64_t turn;     /* the slot that was used last */
    int64_t at, end;  /* of the file */
    struct comb *combs; /* sorted by their first bytes; none is empty */
    int64_t comb_count, first_comb; /* the first that may have bytes from `at` on */
};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void nap(void)
{
    struct timespec moment = {.tv_nsec = 10000}; /* the system makes 60 us of it */
    nanosleep(&moment, NULL);
}

static int fail(struct link *link, int error)
{
    int none = 0;
    atomic_compare_exchange_strong(&link->error, &none, error);
    return error;
}

static int grow(void *array, size_t width, size_t room)
{
    void *larger = realloc(*(void **)array, width * room);
    if (!larger)
        return OUT_OF_MEMORY;
    *(void **)array = larger;
    return 0;
}

static int gather(struct batch *batch, const char *slot, const struct copy *copy)
{
    if (copy->rows == 1) {
        if (batch->count == batch->room) {
            size_t room = batch->room ? 2 * batch->room : 64;
            if (grow(&batch->to, sizeof *batch->to, room) ||
                grow(&batch->from, sizeof *batch->from, room) ||
                grow(&batch->nbytes, sizeof *batch->nbytes, room))
                return OUT_OF_MEMORY;
            batch->room = room;
        }
        batch->to[batch->count] = copy->to;
        batch->from[batch->count] = (uint64_t)(uintptr_t)(slot + copy->at);
        batch->nbytes[batch->count++] = copy->width;
    } else {
        if (batch->rows_count == batch->rows_room) {
            size_t room = batch->rows_room ? 2 * batch->rows_room : 64;
            if (grow(&batch->rows, sizeof *batch->rows, room))
                return OUT_OF_MEMORY;
            batch->rows_room = room;
        }
        batch->rows[batch->rows_count++] = (struct rows){
            .from_kind = HOST,
            .from_host = slot + copy->at,
            .from_pitch = copy->pitch,
            .to_kind = DEVICE,
            .to_device = copy->to,
            .to_pitch = copy->width,
            .width = copy->width,
            .height = copy->rows,
        };
    }
    batch->bytes += copy->width * copy->rows;
    return 0;
}

static int copy_all(const struct link *link, const struct batch *batch)
{
    const struct gpu *gpu = &link->gpu;
    int error = 0;
    if (batch->count > 1 && gpu->copy_all) {
        struct attributes attributes = {.order = IN_STREAM_ORDER};
        size_t first = 0, failed;
        error = gpu->copy_all(batch->to, batch->from, batch->nbytes, batch->count, &attributes,
                              &first, 1, &failed, link->stream);
    } else {
        for (size_t k = 0; k < batch->count && !error; k++)
            error = gpu->copy(batch->to[k], (const void *)(uintptr_t)batch->from[k],
                              batch->nbytes[k], link->stream);
    }
    for (size_t k = 0; k < batch->rows_count && !error; k++)
        error = gpu->copy_rows(&batch->rows[k], link->stream);
    return error;
}

static void note_ended(struct link *link)
{
    while (!link->error && link->ended < link->begun) {
        int64_t next = link->ended + 1;
        int state = link->gpu.query(link->events[next % EVENTS]);
        if (state == NOT_READY)
            return;
        if (state) {
            fail(link, state);
            return;
        }
        link->ended = next;
    }
}

/* The batch that gathers, if it is to be begun: others, who hold `gathering`, add to it. */
static struct batch *due(struct link *link)
{
    int64_t under_way = link->begun - link->ended;
    struct batch *batch = &link->batches[link->taken % 2];
    if (link->error || !batch->bytes || under_way >= UNDER_WAY)
        return NULL;
    return !under_way || batch->bytes >= ENOUGH ? batch : NULL;
}

/* Begin what has gathered, if it is to be; whether it was. */
static int begin_batch(struct link *link)
{
    pthread_mutex_lock(&link->gathering);
    struct batch *batch = due(link);
    if (batch)
        link->taken++; /* the others go on with the next */
    pthread_mutex_unlock(&link->gathering);
    if (!batch)
        return 0;
    int error = copy_all(link, batch);
    int recorded = link->gpu.record(link->events[link->taken % EVENTS], link->stream);
    batch->count = batch->rows_count = batch->bytes = 0;
    if (error || recorded)
        fail(link, error ? error : recorded);
    link->begun = link->taken;
    return 1;
}

/* Note what has ended, and begin what is to be begun. Nobody waits: one thread does it, and the
 * others, who have something to read, leave to it what they brought. */
static void advance(struct link *link)
{
    int more;
    do {
        if (pthread_mutex_trylock(&link->beginning))
            return;
        note_ended(link);
        while (begin_batch(link))
            ;
        pthread_mutex_unlock(&link->beginning);
        pthread_mutex_lock(&link->gathering);
        more = due(link) != NULL;
        pthread_mutex_unlock(&link->gathering);
    } while (more);
}

/* Return when a link has come to a batch in what it counts; or an error, LATE after a time. */
static int reach(struct link *link, const atomic_llong *count, int64_t batch, int64_t until)
{
    while (*count < batch) {
        if (link->error)
            return link->error;
        advance(link);
        if (*count >= batch)
            break;
        if (now() >= until)
            return LATE;
        nap();
    }
    return 0;
}

/* Return when a batch has ended; or an error, LATE after a time. */
int warmcast_link_wait(struct link *link, int64_t batch, int64_t until)
{
    return reach(link, &link->ended, batch, until);
}

/* Add copies from a slot to the batch that gathers. */
static int add(struct lane *lane, int64_t slot, const struct copy *copies, int64_t count)
{
    struct link *link = lane->link;
    const char *address = lane->slots + slot * lane->slot_bytes;
    int error = 0;
    pthread_mutex_lock(&link->gathering);
    struct batch *batch = &link->batches[link->taken % 2];
    for (int64_t k = 0; k < count && !error; k++)
        error = gather(batch, address, &copies[k]);
    if (batch->bytes) /* else the slot would wait for a batch that may never be */
        lane->batches[slot] = link->taken + 1;
    pthread_mutex_unlock(&link->gathering);
    return error ? fail(link, error) : 0;
}

/* What goes to its place of a comb's row in a slot that holds the file's bytes from `at` on. */
static struct copy part_of_row(const struct comb *comb, int64_t row, int64_t at, int64_t end)
{
    int64_t first = comb->first + row * comb->pitch, last = first + comb->width;
    int64_t low = first > at ? first : at, high = last < end ? last : end;
    return (struct copy){
        comb->to + row * comb->width + low - first, low - at, high - low, comb->pitch, 1};
}

/* What goes to its place of a comb in a slot that holds the file's bytes `at` to `end`: the row
 * that begins before, the row that ends after, and those in between; how many copies that are. */
static int copies_of(const struct comb *comb, int64_t at, int64_t end, struct copy copies[3])
{
    int64_t ended = comb->first + comb->width; /* the first row */
    int64_t row = at < ended ? 0 : (at - ended) / comb->pitch + 1;
    int64_t rows = end <= comb->first ? 0 : (end - comb->first - 1) / comb->pitch + 1;
    int count = 0;
    if (rows > comb->rows)
        rows = comb->rows;
    if (row < rows && comb->first + row * comb->pitch < at)
        copies[count++] = part_of_row(comb, row++, at, end);
    if (row < rows && ended + (rows - 1) * comb->pitch > end)
        copies[count++] = part_of_row(comb, --rows, at, end);
    if (row < rows) {
        copies[count] = part_of_row(comb, row, at, end);
        copies[count++].rows = rows - row;
    }
    return count;
}

static int add_all(struct lane *lane, int64_t slot, int64_t end)
{
    for (int64_t k = lane->first_comb; k < lane->comb_count; k++) {
        const struct comb *comb = &lane->combs[k];
        if (comb->first >= end)
            break;
        if (k == lane->first_comb &&
            comb->first + (comb->rows - 1) * comb->pitch + comb->width <= lane->at) {
            lane->first_comb++;
            continue;
        }
        struct copy copies[3];
        int error = add(lane, slot, copies, copies_of(comb, lane->at, end, copies));
        if (error)
            return error;
    }
    return 0;
}

int warmcast_pump_layout(void)
{
    return LAYOUT;
}

int warmcast_link_events(void)
{
    return EVENTS;
}

/* A link by a stream, with events of its context; NULL if there is no memory. */
struct link *warmcast_link_new(const struct gpu *gpu, void *stream, void *const *events)
{
    struct link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    link->gpu = *gpu;
    link->stream = stream;
    memcpy(link->events, events, sizeof link->events);
    pthread_mutex_init(&link->gathering, NULL);
    pthread_mutex_init(&link->beginning, NULL);
    return link;
}

/* Nobody may use it any more, nor be waiting for a copy; what only gathered is forgotten. */
void warmcast_link_free(struct link *link)
{
    for (int k = 0; k < 2; k++) {
        free(link->batches[k].to);
        free(link->batches[k].from);
        free(link->batches[k].nbytes);
        free(link->batches[k].rows);
    }
    pthread_mutex_destroy(&link->gathering);
    pthread_mutex_destroy(&link->beginning);
    free(link);
}

/* From now on copies are begun one by one. */
void warmcast_link_single(struct link *link)
{
    pthread_mutex_lock(&link->beginning);
    link->gpu.copy_all = NULL;
    pthread_mutex_unlock(&link->beginning);
}

/* Return when nothing is being begun any more, and nothing will be. */
void warmcast_link_stop(struct link *link)
{
    fail(link, STOPPED);
    pthread_mutex_lock(&link->beginning);
    pthread_mutex_unlock(&link->beginning);
}

/* Return when all that was brought so far has begun; or an error, LATE after a time. */
int warmcast_link_begin(struct link *link, int64_t until)
{
    pthread_mutex_lock(&link->gathering);
    int64_t last = link->taken + (link->batches[link->taken % 2].bytes > 0);
    pthread_mutex_unlock(&link->gathering);
    int error = reach(link, &link->begun, last, until);
    return error ? error : link->error;
}

/* Have a slot's bytes copied to their places; an error, 0 if there is none. */
int warmcast_lane_bring(struct lane *lane, int64_t slot, const struct copy *copies, int64_t count)
{
    add(lane, slot, copies, count);
    advance(lane->link);
    return lane->link->error;
}

/* Send the file's bytes from `at` on, until some cannot be read at once, or until a time
 * (CLOCK_MONOTONIC, nanoseconds); an error of the driver's, 0 if there is none. */
int warmcast_lane_pump(struct lane *lane, int fd, int flags, int64_t until)
{
    while (lane->at < lane->end && now() < until) {
        int64_t turn = (lane->turn + 1) % lane->slot_count;
        int64_t left = lane->end - lane->at;
        size_t length = left < lane->slot_bytes ? left : lane->slot_bytes;
        int error = warmcast_link_wait(lane->link, lane->batches[turn], until);
        if (error)
            return error == LATE ? 0 : error;
        struct iovec vector = {lane->slots + turn * lane->slot_bytes, length};
        if (preadv2(fd, &vector, 1, lane->at, flags) != (ssize_t)length)
            return 0;
        lane->turn = turn;
        add_all(lane, turn, lane->at + length);
        advance(lane->link);
        if (lane->link->error)
            return lane->link->error;
        lane->at += length;
    }
    return 0;
}
