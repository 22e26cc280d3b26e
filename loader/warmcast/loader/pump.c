/* From the page cache to a GPU without the interpreter.
 *
 * A thread that streams reads a piece of a file into a slot of pinned memory, begins to copy it to
 * its places, and goes on with the next slot, ten thousand times a second. In Python each of them
 * has to have the interpreter's lock for that, and where processors are shared its holder may be
 * off the processor: all others wait. So this is what a thread does as long as all goes well.
 * Whatever does not, it leaves to Python at the piece where it is.
 *
 * The GPU is four functions of the CUDA driver, so that this is built without CUDA.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#include <time.h>

#define LAYOUT 1 /* of what follows: pump.py has the same */

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
enum { HOST = 1, DEVICE = 2 };

struct gpu {
    int (*copy)(uint64_t to, const void *from, size_t nbytes, void *stream);
    int (*copy_rows)(const struct rows *, void *stream);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
};
struct slot {
    char *address;
    void *event; /* behind the last copy from the slot */
};
struct piece {
    int64_t begin, nbytes, copies;
};
struct copy {
    int64_t to, at, width, pitch, rows;
};
struct pump {
    struct gpu gpu;
    void *stream;
    struct slot *slots;
    int64_t slot_count, turn; /* the slot that was used last */
    struct piece *pieces;
    int64_t piece_count;
    struct copy *copies;
    int64_t next_piece, next_copy;
};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int begin_copy(const struct pump *pump, const char *slot, const struct copy *copy)
{
    if (copy->rows == 1)
        return pump->gpu.copy(copy->to, slot + copy->at, copy->width, pump->stream);
    struct rows rows = {
        .from_kind = HOST,
        .from_host = slot + copy->at,
        .from_pitch = copy->pitch,
        .to_kind = DEVICE,
        .to_device = copy->to,
        .to_pitch = copy->width,
        .width = copy->width,
        .height = copy->rows,
    };
    return pump->gpu.copy_rows(&rows, pump->stream);
}

int warmcast_pump_layout(void)
{
    return LAYOUT;
}

/* Send the pieces from `next_piece` on, until one cannot be read whole at once, or until a time
 * (CLOCK_MONOTONIC, nanoseconds); an error of the driver's, 0 if there is none. */
int warmcast_pump(struct pump *pump, int fd, int flags, int64_t until)
{
    while (pump->next_piece < pump->piece_count && now() < until) {
        const struct piece *piece = &pump->pieces[pump->next_piece];
        int64_t turn = (pump->turn + 1) % pump->slot_count;
        const struct slot *slot = &pump->slots[turn];
        int error = pump->gpu.synchronize(slot->event);
        if (error)
            return error;
        struct iovec vector = {slot->address, piece->nbytes};
        if (preadv2(fd, &vector, 1, piece->begin, flags) != piece->nbytes)
            return 0;
        pump->turn = turn;
        for (int64_t k = 0; k < piece->copies && !error; k++)
            error = begin_copy(pump, slot->address, &pump->copies[pump->next_copy + k]);
        int recorded = pump->gpu.record(slot->event, pump->stream);
        if (error || recorded)
            return error ? error : recorded;
        pump->next_copy += piece->copies;
        pump->next_piece++;
    }
    return 0;
}
