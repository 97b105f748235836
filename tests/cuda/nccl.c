/* Stands in for NCCL between processes of one machine: a libnccl.so.2 whose collectives move the data truly, through
 * shared memory. It is written from the behaviour that nccl.h documents; only what libtorch_cuda calls is there.
 *
 * A collective ends within the call, when all ranks of the communicator have made it. On a GPU the call returns at once,
 * so some programs that hang here do not hang there. What is wrong everywhere is an error here: two ranks of a
 * communicator on one GPU, ranks that make different calls, a rank that leaves while others wait for it. No call waits
 * longer than $STANDIN_PATIENCE seconds (60). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

typedef enum { OK = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 } result;
typedef struct { char text[128]; } unique_id;
typedef struct comm *comm_t;
enum { SUM, PROD, MAX, MIN, AVG, FIRST_OWN_OPERATION };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
static const char *const type_names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32",
                                         "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *const operation_names[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
enum { NO_COLOR = -1, CHUNK = 1 << 19, PIECE = 1 << 16, MOST_RANKS = 64, OWN_OPERATIONS = 16 };

enum { BYTES_PER_NS = 100, LATENCY_NS = 10000 };

/* From cuda.c. */
int cudaMalloc(void **memory, size_t size);
int cudaFree(void *memory);
int cudaSetDevice(int device);

enum state { ABSENT, PRESENT, GONE };
struct place { /* of one rank, in memory that all ranks of a communicator share */
    _Atomic uint32_t phase;   /* number of meetings at which this rank has arrived; others wait on it */
    _Atomic uint32_t bell;    /* rung by those that put or take a piece of a message of this rank's */
    _Atomic uint32_t state;
    int card;
    char call[2][160];        /* by the parity of the phase, like the data: nobody overwrites what another still reads */
    int color, key;
};
struct mail { /* from one rank to another */
    _Atomic uint32_t put, taken;
    uint64_t bytes;
    int type;
    char piece[PIECE];
};
struct shared {
    _Atomic uint32_t attached, is_aborted;
    char why[400];
    struct place places[MOST_RANKS];
};
struct comm {
    int rank, size, device;
    char path[128];
    struct shared *shared;
    size_t length;
    pthread_mutex_t busy;
    unsigned long calls, splits;
    _Atomic int error, is_aborted;
    int is_of_all; /* one of the communicators that one process has for several GPUs */
    double scalars[OWN_OPERATIONS];
    int scalars_used;
};

static _Thread_local char last_error[600];
static _Thread_local int depth;
struct operation { comm_t comm; int is_send, type, peer, is_begun, is_done; char *data; size_t bytes, moved; };
static _Thread_local struct operation *queue;
static _Thread_local int queued, room;

static result fail(comm_t comm, result code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    fprintf(stderr, "NCCL stand-in: %s\n", last_error);
    if (comm)
        comm->error = code;
    return code;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}
static double patience(void)
{
    return atof(standin_option("PATIENCE", "60"));
}
static void wait_on(_Atomic uint32_t *word, uint32_t value)
{
    struct timespec slice = {0, 20000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &slice, NULL, 0);
}
static void wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static size_t length_for(int size)
{
    return sizeof(struct shared) + (size_t)size * 2 * CHUNK + (size_t)size * size * sizeof(struct mail);
}
static char *chunk_of(comm_t comm, int rank, uint32_t phase)
{
    return (char *)(comm->shared + 1) + ((size_t)rank * 2 + (phase & 1)) * CHUNK;
}
static struct mail *mail_between(comm_t comm, int from, int to)
{
    return (struct mail *)((char *)(comm->shared + 1) + (size_t)comm->size * 2 * CHUNK) + (size_t)from * comm->size + to;
}

/* Return an error if a rank's wait is in vain: the communicator was aborted, a rank has left it, or it takes too long. */
static result in_vain(comm_t comm, const char *call, int other, double deadline)
{
    struct shared *shared = comm->shared;
    if (comm->is_aborted || shared->is_aborted)
        return fail(comm, REMOTE_ERROR, "rank %d waited in call %lu, %s: %s", comm->rank, comm->calls, call,
                    comm->is_aborted ? "this rank aborted the communicator" : shared->why);
    if (shared->places[other].state == GONE)
        return fail(comm, REMOTE_ERROR, "rank %d waited in call %lu, %s, for rank %d, which has left the communicator",
                    comm->rank, comm->calls, call, other);
    if (now() > deadline)
        return fail(comm, SYSTEM_ERROR, "rank %d waited too long in call %lu, %s, for rank %d, whose last call was %s",
                    comm->rank, comm->calls, call, other, shared->places[other].phase
                    ? shared->places[other].call[(shared->places[other].phase - 1) & 1] : "none");
    return OK;
}

/* Arrive at the next meeting of all ranks, and wait for them. What a rank has written before, the others may read now. */
static result meet(comm_t comm, const char *call)
{
    struct place *places = comm->shared->places, *own = &places[comm->rank];
    uint32_t phase = own->phase;
    double deadline = now() + patience();
    result found;
    snprintf(own->call[phase & 1], sizeof own->call[0], "%s", call);
    own->phase = phase + 1;
    wake(&own->phase);
    for (int other = 0; other < comm->size; other++)
        for (uint32_t theirs; (int32_t)((theirs = places[other].phase) - phase - 1) < 0; wait_on(&places[other].phase, theirs))
            if ((found = in_vain(comm, call, other, deadline)))
                return found;
    for (int other = 0; other < comm->size; other++)
        if (strcmp(places[other].call[phase & 1], call))
            return fail(comm, INVALID_USAGE, "call %lu of a communicator is %s on rank %d, but %s on rank %d", comm->calls,
                        call, comm->rank, places[other].call[phase & 1], other);
    return OK;
}

static result attach(comm_t *made, const char *path, int size, int rank)
{
    comm_t comm = calloc(1, sizeof *comm);
    struct place *own;
    double deadline = now() + patience();
    result found;
    *made = NULL;
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size)
        return fail(NULL, INVALID_ARGUMENT, "rank %d of %d: at most %d ranks are possible here", rank, size, MOST_RANKS);
    comm->rank = rank, comm->size = size, comm->length = length_for(size);
    pthread_mutex_init(&comm->busy, NULL);
    snprintf(comm->path, sizeof comm->path, "%s", path);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, comm->length))
        return fail(NULL, SYSTEM_ERROR, "%s: %s", path, strerror(errno));
    comm->shared = mmap(NULL, comm->length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED)
        return fail(NULL, SYSTEM_ERROR, "%s: %s", path, strerror(errno));
    own = &comm->shared->places[rank];
    comm->device = standin_device();
    if ((own->card = standin_card(comm->device)) < 0)
        return fail(NULL, CUDA_ERROR, "rank %d has no GPU", rank);
    own->state = PRESENT;
    if (atomic_fetch_add(&comm->shared->attached, 1) + 1 == (uint32_t)size)
        unlink(path); /* all hold it by their maps now */
    wake(&comm->shared->attached);
    for (uint32_t seen; (seen = comm->shared->attached) < (uint32_t)size; wait_on(&comm->shared->attached, seen))
        for (int other = 0; other < size; other++)
            if (comm->shared->places[other].state != PRESENT && (found = in_vain(comm, "CommInitRank", other, deadline))) {
                unlink(path);
                return found;
            }
    for (int other = 0; other < size; other++)
        if (other != rank && comm->shared->places[other].card == own->card) {
            own->state = GONE;
            return fail(NULL, INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on card %d", rank, other, own->card);
        }
    standin_log("nccl CommInit rank %d of %d on card %d", rank, size, own->card);
    *made = comm;
    return OK;
}

/* After this no call of another rank waits for this one, and no call of this one reads the shared memory. */
static void leave(comm_t comm, const char *why)
{
    struct shared *shared = comm->shared;
    if (!shared)
        return;
    if (why && !shared->is_aborted) {
        snprintf(shared->why, sizeof shared->why, "rank %d %s", comm->rank, why);
        shared->is_aborted = 1;
    }
    comm->is_aborted = 1;
    shared->places[comm->rank].state = GONE;
    for (int rank = 0; rank < comm->size; rank++)
        wake(&shared->places[rank].phase), wake(&shared->places[rank].bell);
    pthread_mutex_lock(&comm->busy); /* a call that waits in another thread ends now */
    comm->shared = NULL;
    munmap(shared, comm->length);
    pthread_mutex_unlock(&comm->busy);
    /* the struct stays: a watchdog may still ask for its error */
}

/* Sums and the like. */
static float of_bfloat(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static uint16_t to_bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0; /* not a number */
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#define SAME(value) (value)
#define COMBINE(STORED, WIDE, READ, WRITE) \
    for (size_t i = 0; i < count; i++) { \
        STORED *to = (STORED *)into + i; \
        WIDE a = READ(*to), b = READ(((const STORED *)from)[i]); \
        WIDE made = operation == PROD ? a * b : operation == MAX ? (a > b ? a : b) : operation == MIN ? (a < b ? a : b) : a + b; \
        *to = WRITE(made); \
    } \
    break
static void combine(void *into, const void *from, size_t count, int type, int operation)
{
    switch (type) {
    case INT8: COMBINE(int8_t, int, SAME, SAME);
    case UINT8: COMBINE(uint8_t, int, SAME, SAME);
    case INT32: COMBINE(int32_t, int64_t, SAME, SAME);
    case UINT32: COMBINE(uint32_t, uint64_t, SAME, SAME);
    case INT64: COMBINE(int64_t, int64_t, SAME, SAME);
    case UINT64: COMBINE(uint64_t, uint64_t, SAME, SAME);
    case FLOAT16: COMBINE(_Float16, float, SAME, SAME);
    case FLOAT32: COMBINE(float, float, SAME, SAME);
    case FLOAT64: COMBINE(double, double, SAME, SAME);
    case BFLOAT16: COMBINE(uint16_t, float, of_bfloat, to_bfloat);
    }
}
#define SCALE(STORED, WIDE, READ, WRITE) \
    for (size_t i = 0; i < count; i++) { \
        STORED *to = (STORED *)into + i; \
        *to = WRITE((WIDE)(is_quotient ? READ(*to) / (WIDE)factor : READ(*to) * (WIDE)factor)); \
    } \
    break
static void scale(void *into, size_t count, int type, double factor, int is_quotient)
{
    switch (type) {
    case INT8: SCALE(int8_t, int, SAME, SAME);
    case UINT8: SCALE(uint8_t, int, SAME, SAME);
    case INT32: SCALE(int32_t, int64_t, SAME, SAME);
    case UINT32: SCALE(uint32_t, uint64_t, SAME, SAME);
    case INT64: SCALE(int64_t, int64_t, SAME, SAME);
    case UINT64: SCALE(uint64_t, uint64_t, SAME, SAME);
    case FLOAT16: SCALE(_Float16, float, SAME, SAME);
    case FLOAT32: SCALE(float, float, SAME, SAME);
    case FLOAT64: SCALE(double, double, SAME, SAME);
    case BFLOAT16: SCALE(uint16_t, float, of_bfloat, to_bfloat);
    }
}

/* A call is made on the communicator's device, with memory of that device. */
static result check(comm_t comm, const char *call, const void *memory)
{
    int device = standin_device();
    if (device != comm->device)
        return fail(comm, INVALID_USAGE, "%s is called on device %d, but rank %d of the communicator has device %d", call,
                    device, comm->rank, comm->device);
    device = memory ? standin_device_of(memory) : comm->device;
    if (device != comm->device)
        return fail(comm, INVALID_ARGUMENT, "%s gets memory of device %d (-1: the host), but rank %d has device %d", call,
                    device, comm->rank, comm->device);
    return OK;
}

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SPLIT };
static const char *const kind_names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "CommSplit"};

/* One collective, chunk by chunk: each rank shows its part of a chunk, all meet, and each takes what it needs. */
static result collective(enum kind kind, const char *send, char *receive, size_t count, int type, int operation, int root,
                         comm_t comm, void *stream)
{
    char call[160], how[64] = "";
    result found = OK;
    if (!comm || type < 0 || type >= TYPES)
        return fail(comm, INVALID_ARGUMENT, "%s without a communicator, or of type %d", kind_names[kind], type);
    int reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER, size = comm->size, rank = comm->rank;
    int is_own = operation >= FIRST_OWN_OPERATION;
    if (reduces && type >= FLOAT8_E4M3)
        return fail(comm, INVALID_ARGUMENT, "no sums of %s here", type_names[type]);
    if (reduces)
        snprintf(how, sizeof how, ", %s", operation_names[is_own ? FIRST_OWN_OPERATION : operation]);
    if (kind == REDUCE || kind == BROADCAST)
        snprintf(how + strlen(how), sizeof how - strlen(how), ", root %d", root);
    snprintf(call, sizeof call, "%s(%zu %s%s)", kind_names[kind], count, type_names[type], how);
    if ((found = check(comm, call, count && (kind != BROADCAST || rank == root) ? send : NULL)) ||
        (found = check(comm, call, count && (kind != REDUCE || rank == root) ? receive : NULL)))
        return found;
    size_t item = sizes[type], parts = kind == REDUCE_SCATTER ? size : 1, most = CHUNK / item / parts, at = 0;
    double factor = is_own ? comm->scalars[operation - FIRST_OWN_OPERATION] : 1;
    pthread_mutex_lock(&comm->busy);
    comm->calls++;
    standin_log("nccl %s rank %d of %d bytes %zu", call, rank, size, count * item);
    standin_work(stream, LATENCY_NS + (int64_t)(count * item / BYTES_PER_NS));
    do {
        if (!comm->shared) {
            found = fail(comm, INVALID_USAGE, "%s on a communicator that rank %d has left", call, rank);
            break;
        }
        size_t now_count = count - at < most ? count - at : most, bytes = now_count * item;
        uint32_t phase = comm->shared->places[rank].phase;
        char *own = chunk_of(comm, rank, phase);
        for (size_t part = 0; part < parts; part++)
            if (kind != BROADCAST || rank == root)
                memcpy(own + part * bytes, send + (part * count + at) * item, bytes);
        if (is_own)
            scale(own, now_count * parts, type, factor, 0);
        if ((found = meet(comm, call)))
            break;
        if (kind == BROADCAST)
            memmove(receive + at * item, chunk_of(comm, root, phase), bytes);
        else if (kind == ALL_GATHER)
            for (int other = 0; other < size; other++)
                memmove(receive + (other * count + at) * item, chunk_of(comm, other, phase), bytes);
        else if (kind != REDUCE || rank == root) {
            size_t skip = kind == REDUCE_SCATTER ? rank * bytes : 0;
            memcpy(receive + at * item, chunk_of(comm, 0, phase) + skip, bytes);
            for (int other = 1; other < size; other++)
                combine(receive + at * item, chunk_of(comm, other, phase) + skip, now_count, type, operation);
            if (operation == AVG)
                scale(receive + at * item, now_count, type, size, 1);
        }
        at += now_count;
    } while (at < count);
    pthread_mutex_unlock(&comm->busy);
    return found;
}

/* Several GPUs in one process, as nn.DataParallel has them. The calls of a group, one for each GPU, are made at its end
 * by a thread for each. */
struct part {
    pthread_t thread;
    int device, rank, size, type, operation, root;
    const char *path, *send;
    char *receive;
    comm_t *made, comm;
    enum kind kind;
    size_t count;
    void *stream;
    result found;
};
static _Thread_local struct part parts[MOST_RANKS];
static _Thread_local int parts_used;

static void *make_part(void *given)
{
    struct part *one = given;
    cudaSetDevice(one->device);
    one->found = one->made ? attach(one->made, one->path, one->size, one->rank)
                           : collective(one->kind, one->send, one->receive, one->count, one->type, one->operation,
                                        one->root, one->comm, one->stream);
    return NULL;
}
static result make_parts(void)
{
    result found = OK;
    for (int i = 0; i < parts_used; i++)
        if (pthread_create(&parts[i].thread, NULL, make_part, &parts[i]))
            abort();
    for (int i = 0; i < parts_used; i++) {
        pthread_join(parts[i].thread, NULL);
        found = found ? found : parts[i].found;
    }
    parts_used = 0;
    return found;
}
static result take(enum kind kind, const char *send, char *receive, size_t count, int type, int operation, int root,
                   comm_t comm, void *stream)
{
    if (!comm || !comm->is_of_all || !depth)
        return collective(kind, send, receive, count, type, operation, root, comm, stream);
    if (parts_used == MOST_RANKS)
        return fail(comm, INVALID_USAGE, "a group with more than %d calls of one process", MOST_RANKS);
    parts[parts_used++] = (struct part){.kind = kind, .send = send, .receive = receive, .count = count, .type = type,
                                        .operation = operation, .root = root, .comm = comm, .stream = stream,
                                        .device = standin_device()};
    return OK;
}

/* Messages from rank to rank. Those of a group move side by side; two between the same ranks keep their order. */
static int advance(struct operation *one)
{
    comm_t comm = one->comm;
    int from = one->is_send ? comm->rank : one->peer, to = one->is_send ? one->peer : comm->rank;
    struct mail *mail = mail_between(comm, from, to);
    size_t piece = one->bytes - one->moved < PIECE ? one->bytes - one->moved : PIECE;
    if (one->is_send) {
        if (mail->put != mail->taken)
            return 0; /* the piece before has not been taken */
        if (one->is_begun && one->moved == one->bytes) {
            one->is_done = 1; /* all is taken */
            return 1;
        }
        mail->bytes = one->bytes, mail->type = one->type;
        memcpy(mail->piece, one->data + one->moved, piece);
        mail->put++;
    } else {
        if (mail->put == mail->taken)
            return 0;
        if (mail->bytes != one->bytes || mail->type != one->type) {
            fail(comm, INVALID_USAGE, "rank %d sends %llu bytes of %s, but rank %d receives %zu bytes of %s", from,
                 (unsigned long long)mail->bytes, type_names[mail->type], to, one->bytes, type_names[one->type]);
            return -1;
        }
        memcpy(one->data + one->moved, mail->piece, piece);
        mail->taken++;
    }
    one->is_begun = 1;
    one->moved += piece;
    if (!one->is_send && one->moved == one->bytes)
        one->is_done = 1;
    struct place *peer = &comm->shared->places[one->peer];
    peer->bell++;
    wake(&peer->bell);
    return 1;
}

static result move_messages(void)
{
    double deadline = now() + patience();
    result found = OK;
    while (!found) {
        int left = -1, has_moved = 0;
        for (int i = 0; i < queued && !found; i++) {
            struct operation *one = &queue[i];
            int is_blocked = one->is_done;
            for (int before = 0; before < i && !is_blocked; before++)
                is_blocked = !queue[before].is_done && queue[before].comm == one->comm && queue[before].peer == one->peer &&
                             queue[before].is_send == one->is_send;
            if (!one->is_done && left < 0)
                left = i;
            if (is_blocked)
                continue;
            pthread_mutex_lock(&one->comm->busy);
            int step = one->comm->shared ? advance(one) : -1;
            if (step < 0)
                found = one->comm->error ? one->comm->error : INVALID_USAGE;
            has_moved |= step > 0;
            pthread_mutex_unlock(&one->comm->busy);
        }
        if (found || left < 0)
            break;
        if (!has_moved) {
            struct operation *one = &queue[left];
            char call[100];
            snprintf(call, sizeof call, "%s(%zu bytes of %s)", one->is_send ? "Send" : "Recv", one->bytes, type_names[one->type]);
            pthread_mutex_lock(&one->comm->busy);
            if (!one->comm->shared)
                found = INVALID_USAGE;
            else if (!(found = in_vain(one->comm, call, one->peer, deadline)))
                wait_on(&one->comm->shared->places[one->comm->rank].bell, one->comm->shared->places[one->comm->rank].bell);
            pthread_mutex_unlock(&one->comm->busy);
        }
    }
    queued = 0;
    return found;
}

static result message(int is_send, char *data, size_t count, int type, int peer, comm_t comm, void *stream)
{
    result found;
    if (!comm || type < 0 || type >= TYPES || peer < 0 || peer >= comm->size)
        return fail(comm, INVALID_ARGUMENT, "a message of type %d to or from rank %d", type, peer);
    if ((found = check(comm, is_send ? "Send" : "Recv", count ? data : NULL)))
        return found;
    if (queued == room)
        queue = realloc(queue, (room = 2 * room + 8) * sizeof *queue);
    queue[queued++] = (struct operation){comm, is_send, type, peer, 0, 0, data, count * sizes[type], 0};
    comm->calls++;
    standin_log("nccl %s rank %d of %d peer %d bytes %zu", is_send ? "Send" : "Recv", comm->rank, comm->size, peer,
                count * sizes[type]);
    standin_work(stream, LATENCY_NS + (int64_t)(count * sizes[type] / BYTES_PER_NS));
    return depth ? OK : move_messages();
}

/* The interface of NCCL. */
result ncclGetVersion(int *version) { *version = 22602; return OK; }
const char *ncclGetErrorString(result code)
{
    static const char *const names[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error"};
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "unknown result code";
}
const char *ncclGetLastError(comm_t comm) { (void)comm; return last_error; }
result ncclGetUniqueId(unique_id *id)
{
    unsigned long long number[2];
    if (getrandom(number, sizeof number, 0) != sizeof number)
        return fail(NULL, SYSTEM_ERROR, "no random numbers");
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "%s/nccl-stand-in-%016llx%016llx", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
             number[0], number[1]);
    return OK;
}
result ncclCommInitRank(comm_t *comm, int size, unique_id id, int rank) { return attach(comm, id.text, size, rank); }
result ncclCommInitRankConfig(comm_t *comm, int size, unique_id id, int rank, void *config)
{
    (void)config;
    return attach(comm, id.text, size, rank);
}
result ncclCommInitRankScalable(comm_t *comm, int size, int rank, int ids, unique_id *id, void *config)
{
    (void)ids, (void)config;
    return attach(comm, id->text, size, rank);
}
result ncclCommInitAll(comm_t *comms, int count, const int *devices)
{
    unique_id id;
    result found = count > MOST_RANKS ? INVALID_ARGUMENT : ncclGetUniqueId(&id);
    if (found)
        return found;
    for (int i = 0; i < count; i++)
        parts[i] = (struct part){.made = &comms[i], .path = id.text, .size = count, .rank = i,
                                 .device = devices ? devices[i] : i};
    parts_used = count;
    if (!(found = make_parts()))
        for (int i = 0; i < count; i++)
            comms[i]->is_of_all = 1;
    return found;
}
result ncclCommSplit(comm_t comm, int color, int key, comm_t *made, void *config)
{
    char call[40], path[200];
    int rank = 0, size = 0;
    result found;
    (void)config;
    *made = NULL;
    pthread_mutex_lock(&comm->busy);
    struct place *places = comm->shared ? comm->shared->places : NULL;
    if (!places) {
        pthread_mutex_unlock(&comm->busy);
        return fail(comm, INVALID_USAGE, "CommSplit of a communicator that rank %d has left", comm->rank);
    }
    places[comm->rank].color = color, places[comm->rank].key = key;
    comm->calls++;
    snprintf(call, sizeof call, "CommSplit(number %lu)", ++comm->splits);
    if (!(found = meet(comm, call)))
        for (int other = 0; other < comm->size; other++)
            if (places[other].color == color) {
                size++;
                rank += places[other].key < key || (places[other].key == key && other < comm->rank);
            }
    if (!found)
        found = meet(comm, call); /* all have read the colors and keys */
    snprintf(path, sizeof path, "%.100s.%lu.%d", comm->path, comm->splits, color);
    pthread_mutex_unlock(&comm->busy);
    return found || color == NO_COLOR ? found : attach(made, path, size, rank);
}
result ncclCommFinalize(comm_t comm) { (void)comm; return OK; }
result ncclCommDestroy(comm_t comm) { leave(comm, NULL); return OK; }
result ncclCommAbort(comm_t comm) { leave(comm, "aborted the communicator"); return OK; }
result ncclCommGetAsyncError(comm_t comm, int *error) { *error = comm->error; return OK; }
result ncclCommCount(const comm_t comm, int *count) { *count = comm->size; return OK; }
result ncclCommCuDevice(const comm_t comm, int *device) { *device = comm->device; return OK; }
result ncclCommUserRank(const comm_t comm, int *rank) { *rank = comm->rank; return OK; }
result ncclCommRegister(const comm_t comm, void *data, size_t size, void **handle)
{
    (void)comm, (void)size;
    *handle = data;
    return OK;
}
result ncclCommDeregister(const comm_t comm, void *handle) { (void)comm, (void)handle; return OK; }
result ncclMemAlloc(void **data, size_t size)
{
    return cudaMalloc(data, size) ? CUDA_ERROR : OK;
}
result ncclMemFree(void *data)
{
    return cudaFree(data) ? CUDA_ERROR : OK;
}
result ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, comm_t comm)
{
    double value;
    (void)residence; /* memory of a device is memory of the host */
    if (comm->scalars_used == OWN_OPERATIONS)
        comm->scalars_used = 0; /* torch destroys each after its call */
    switch (type) {
    case FLOAT16: value = *(_Float16 *)scalar; break;
    case FLOAT32: value = *(float *)scalar; break;
    case FLOAT64: value = *(double *)scalar; break;
    case BFLOAT16: value = of_bfloat(*(uint16_t *)scalar); break;
    default: return fail(comm, INVALID_ARGUMENT, "a factor of type %d", type);
    }
    comm->scalars[comm->scalars_used] = value;
    *operation = FIRST_OWN_OPERATION + comm->scalars_used++;
    return OK;
}
result ncclRedOpDestroy(int operation, comm_t comm) { (void)operation, (void)comm; return OK; }
result ncclGroupStart(void) { depth++; return OK; }
result ncclGroupEnd(void)
{
    if (!depth)
        return fail(NULL, INVALID_USAGE, "GroupEnd without GroupStart");
    if (--depth)
        return OK;
    result found = make_parts();
    return found ? found : move_messages();
}
result ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation, comm_t comm, void *stream)
{
    return take(ALL_REDUCE, send, receive, count, type, operation, 0, comm, stream);
}
result ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root, comm_t comm, void *stream)
{
    return take(REDUCE, send, receive, count, type, operation, root, comm, stream);
}
result ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, comm_t comm, void *stream)
{
    return take(BROADCAST, send, receive, count, type, SUM, root, comm, stream);
}
result ncclBcast(void *data, size_t count, int type, int root, comm_t comm, void *stream)
{
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
result ncclAllGather(const void *send, void *receive, size_t count, int type, comm_t comm, void *stream)
{
    return take(ALL_GATHER, send, receive, count, type, SUM, 0, comm, stream);
}
result ncclReduceScatter(const void *send, void *receive, size_t count, int type, int operation, comm_t comm, void *stream)
{
    return take(REDUCE_SCATTER, send, receive, count, type, operation, 0, comm, stream);
}
result ncclSend(const void *data, size_t count, int type, int peer, comm_t comm, void *stream)
{
    return message(1, (char *)data, count, type, peer, comm, stream);
}
result ncclRecv(void *data, size_t count, int type, int peer, comm_t comm, void *stream)
{
    return message(0, data, count, type, peer, comm, stream);
}
