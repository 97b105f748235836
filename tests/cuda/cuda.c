/* A CUDA driver and runtime for machines without a GPU. Host code of torch, Triton and this project runs as on a GPU.
 *
 * Device memory is memory of the host, filled with zeros. Copies copy at once. Kernels compute nothing. A stream is the
 * time at which its work is done: each launch and each copy adds to it, events keep it, and waiting sleeps until then.
 * Errors are those that the CUDA documentation names: device memory that does not exist or is too short, a stream of
 * another device, an impossible launch, a full device, a process forked from one that has opened the driver.
 *
 * standin.py compiles this file. Functions that torch's libraries name and that are not here return 0 and do nothing.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cards.h"
#include "standin.h"

#define DRIVER_VERSION 12080
#define MEGABYTES_PER_S 25000 /* of a copy between host and device */
#define LAUNCH_NS 1000        /* of a kernel */
#define COPY_NS 2000          /* of a copy, besides its bytes */
#define CLOCK_KHZ 1980000
#define GRAIN 512 /* bytes: what memory is counted in */
#define MAPPED (64 << 10) /* bytes from which memory is mapped, so that zeros cost nothing */

/* --- options and the log -------------------------------------------------------------------------------------------*/

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *standin_option(const char *name, const char *otherwise)
{
    char whole[64];
    snprintf(whole, sizeof whole, "STANDIN_%s", name);
    const char *value = getenv(whole);
    return value && *value ? value : otherwise;
}

static long long launches; /* not yet in the log */

static void write_line(const char *text)
{
    static int file = -2;
    if (file == -2) {
        const char *path = standin_option("LOG", NULL);
        file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    }
    if (file < 0)
        return;
    char line[300];
    long long count = __atomic_exchange_n(&launches, 0, __ATOMIC_RELAXED);
    int length = 0, pid = (int)getpid();
    if (count)
        length = snprintf(line, sizeof line, "%d launches %lld\n", pid, count);
    length += snprintf(line + length, sizeof line - (size_t)length, "%d %s\n", pid, text);
    if (write(file, line, (size_t)length) < 0)
        file = -1;
}

void standin_log(const char *format, ...)
{
    char text[200];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    write_line(text);
}

/* --- errors, devices, forks ----------------------------------------------------------------------------------------*/

static __thread cudaError_t last_error;
static __thread int current;
static int visible[STANDIN_CARDS], devices;
static bool has_context[STANDIN_CARDS];
static bool started, forked;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static cudaError_t result(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

static void in_child(void) { forked = true; }

static struct card cards[STANDIN_CARDS]; /* as they were when the driver was opened */
static int in_machine;
static void look(void)
{
    while (in_machine < STANDIN_CARDS && read_card((unsigned)in_machine, &cards[in_machine]))
        in_machine++;
}
int standin_cards(void)
{
    static pthread_once_t looked = PTHREAD_ONCE_INIT;
    pthread_once(&looked, look);
    return in_machine;
}

void standin_uuid(int card, unsigned char bytes[16])
{
    const char *text = cards[card].uuid + strlen("GPU-");
    for (int n = 0; n < 16; n++, text += 2) {
        text += *text == '-';
        sscanf(text, "%2hhx", &bytes[n]);
    }
}

/* The card that an entry of CUDA_VISIBLE_DEVICES names: a number, or the beginning of a UUID. */
static int named(const char *text)
{
    if (strncmp(text, "GPU-", 4)) {
        char *end;
        long number = strtol(text, &end, 10);
        return end == text || *end || number < 0 || number >= standin_cards() ? -1 : (int)number;
    }
    for (int card = 0; card < standin_cards(); card++)
        if (!strncmp(cards[card].uuid, text, strlen(text)))
            return card;
    return -1;
}

static void start(void)
{
    const char *names = getenv("CUDA_VISIBLE_DEVICES");
    if (names) {
        char *copy = strdup(names), *rest = copy, *name;
        while ((name = strsep(&rest, ",")) && devices < STANDIN_CARDS) {
            name += strspn(name, " ");
            if ((visible[devices] = named(name)) < 0)
                break; /* as CUDA does: entries after a wrong one do not count */
            devices++;
        }
        free(copy);
    } else
        for (; devices < standin_cards(); devices++)
            visible[devices] = devices;
    pthread_atfork(NULL, NULL, in_child);
    started = true;
    standin_log("driver %d devices", devices);
    for (int device = 0; names && device < devices; device++)
        standin_log("device %d is card %d", device, visible[device]);
}

/* Open the driver, as cuInit does. */
static cudaError_t opened(void)
{
    if (forked) {
        standin_log("after-fork");
        return cudaErrorInitializationError;
    }
    pthread_once(&once, start);
    return devices ? cudaSuccess : cudaErrorNoDevice;
}

/* Open a device, as a runtime call that needs a context does. */
static cudaError_t context_on(int device)
{
    cudaError_t error = opened();
    if (error)
        return error;
    if (device < 0 || device >= devices)
        return cudaErrorInvalidDevice;
    if (!__atomic_exchange_n(&has_context[device], true, __ATOMIC_RELAXED))
        standin_log("context %d", device);
    return cudaSuccess;
}

#define OPENED() \
    do { \
        cudaError_t error_ = opened(); \
        if (error_) \
            return result(error_); \
    } while (0)
#define CONTEXT() \
    do { \
        cudaError_t error_ = context_on(current); \
        if (error_) \
            return result(error_); \
    } while (0)

int standin_device(void) { return current; }
int standin_card(int device) { return !opened() && device >= 0 && device < devices ? visible[device] : -1; }

static const struct {
    cudaError_t code;
    const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

static int known(cudaError_t code)
{
    int n = 0;
    while (n < (int)(sizeof ERRORS / sizeof *ERRORS) && ERRORS[n].code != code)
        n++;
    return n < (int)(sizeof ERRORS / sizeof *ERRORS) ? n : -1;
}
const char *cudaGetErrorName(cudaError_t code) { return known(code) < 0 ? "cudaErrorUnknown" : ERRORS[known(code)].name; }
const char *cudaGetErrorString(cudaError_t code) { return known(code) < 0 ? "unknown error" : ERRORS[known(code)].text; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    OPENED();
    *count = devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    OPENED();
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    cudaError_t error = context_on(device);
    if (!error && device != current) {
        current = device;
        standin_log("set_device %d", device);
    }
    return result(error);
}
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = DRIVER_VERSION, cudaSuccess; }

static size_t memory_size(int device) { return cards[visible[device]].size / GRAIN * GRAIN; }

static void capability(int device, int *major, int *minor)
{
    *major = (int)cards[visible[device]].major, *minor = (int)cards[visible[device]].minor;
}

/* Attributes of an H100. Both interfaces number them in the same way. */
static int attribute(int which, int device)
{
    int major, minor;
    capability(device, &major, &minor);
    int shared = major >= 9 ? 227 << 10 : major == 8 && minor == 0 ? 163 << 10 : major == 8 ? 99 << 10 : 64 << 10;
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return major;
    case cudaDevAttrComputeCapabilityMinor: return minor;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return shared;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared + 1024;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return CLOCK_KHZ;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrTextureAlignment:
    case cudaDevAttrTexturePitchAlignment: return 512;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrPciBusId: return standin_card(device) + 1;
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrEccEnabled:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    OPENED();
    if (device < 0 || device >= devices)
        return result(cudaErrorInvalidDevice);
    *value = attribute((int)which, device);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    OPENED();
    if (device < 0 || device >= devices)
        return result(cudaErrorInvalidDevice);
#define A(name) attribute(cudaDevAttr##name, device)
    *p = (struct cudaDeviceProp){
        .totalGlobalMem = memory_size(device),
        .sharedMemPerBlock = (size_t)A(MaxSharedMemoryPerBlock),
        .regsPerBlock = A(MaxRegistersPerBlock),
        .warpSize = A(WarpSize),
        .memPitch = 2147483647,
        .maxThreadsPerBlock = A(MaxThreadsPerBlock),
        .maxThreadsDim = {A(MaxBlockDimX), A(MaxBlockDimY), A(MaxBlockDimZ)},
        .maxGridSize = {A(MaxGridDimX), A(MaxGridDimY), A(MaxGridDimZ)},
        .clockRate = A(ClockRate),
        .totalConstMem = (size_t)A(TotalConstantMemory),
        .major = A(ComputeCapabilityMajor),
        .minor = A(ComputeCapabilityMinor),
        .textureAlignment = (size_t)A(TextureAlignment),
        .texturePitchAlignment = (size_t)A(TexturePitchAlignment),
        .deviceOverlap = 1,
        .multiProcessorCount = A(MultiProcessorCount),
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = A(PciBusId),
        .asyncEngineCount = A(AsyncEngineCount),
        .unifiedAddressing = 1,
        .memoryClockRate = A(MemoryClockRate),
        .memoryBusWidth = A(GlobalMemoryBusWidth),
        .l2CacheSize = A(L2CacheSize),
        .maxThreadsPerMultiProcessor = A(MaxThreadsPerMultiProcessor),
        .streamPrioritiesSupported = 1,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .sharedMemPerMultiprocessor = (size_t)A(MaxSharedMemoryPerMultiprocessor),
        .regsPerMultiprocessor = A(MaxRegistersPerMultiprocessor),
        .managedMemory = 1,
        .concurrentManagedAccess = 1,
        .computePreemptionSupported = 1,
        .canUseHostPointerForRegisteredMem = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = (size_t)A(MaxSharedMemoryPerBlockOptin),
        .maxBlocksPerMultiProcessor = A(MaxBlocksPerMultiprocessor),
        .reservedSharedMemPerBlock = (size_t)A(ReservedSharedMemoryPerBlock),
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
    };
#undef A
    snprintf(p->name, sizeof p->name, "%s", cards[visible[device]].name);
    standin_uuid(visible[device], (unsigned char *)p->uuid.bytes);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device)
{
    OPENED();
    if (device < 0 || device >= devices)
        return result(cudaErrorInvalidDevice);
    snprintf(text, (size_t)room, "0000:%02X:00.0", visible[device] + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

/* --- streams and events --------------------------------------------------------------------------------------------*/

struct CUstream_st {
    int device, priority;
    unsigned flags;
    int64_t done;
};
struct CUevent_st {
    int device;
    unsigned flags;
    bool recorded;
    int64_t done;
};
static struct CUstream_st defaults[STANDIN_CARDS];
static int64_t busy[STANDIN_CARDS]; /* until when a device has work, on any stream */

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}
static void sleep_until(int64_t then)
{
    struct timespec time = {then / 1000000000, then % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
        ;
}

static struct CUstream_st *resolved(cudaStream_t stream)
{
    if (stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread)
        return stream;
    defaults[current].device = current;
    return &defaults[current];
}

void standin_work(void *stream, int64_t nanoseconds)
{
    struct CUstream_st *s = resolved(stream);
    int64_t time = now();
    pthread_mutex_lock(&lock);
    s->done = (s->done > time ? s->done : time) + nanoseconds;
    if (s->done > busy[s->device])
        busy[s->device] = s->done;
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    CONTEXT();
    *stream = calloc(1, sizeof **stream);
    **stream = (struct CUstream_st){.device = current, .priority = priority, .flags = flags};
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    CONTEXT();
    free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return *priority = resolved(s)->priority, cudaSuccess; }
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *flags) { return *flags = resolved(s)->flags, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    CONTEXT();
    return result(resolved(stream)->done <= now() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    CONTEXT();
    standin_log("sync stream %d", resolved(stream)->device);
    sleep_until(resolved(stream)->done);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    CONTEXT();
    struct CUstream_st *s = resolved(stream);
    pthread_mutex_lock(&lock);
    if (event->recorded && event->done > s->done)
        s->done = event->done;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    (void)stream;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count)
{
    (void)stream, (void)id, (void)graph, (void)nodes, (void)count;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)stream, (void)mode;
    return result(cudaErrorNotSupported);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    (void)stream;
    CONTEXT();
    function(data);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags)
{
    (void)flags;
    CONTEXT();
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
    CONTEXT();
    standin_log("sync device %d", current);
    sleep_until(busy[current]);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    CONTEXT();
    *event = calloc(1, sizeof **event);
    **event = (struct CUevent_st){.device = current, .flags = flags};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    CONTEXT();
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    (void)flags;
    CONTEXT();
    struct CUstream_st *s = resolved(stream);
    if (event->device != s->device)
        return result(cudaErrorInvalidResourceHandle);
    int64_t time = now();
    event->recorded = true;
    event->done = s->done > time ? s->done : time;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event)
{
    CONTEXT();
    return result(event->recorded && event->done > now() ? cudaErrorNotReady : cudaSuccess);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    CONTEXT();
    standin_log("sync event %d", event->device);
    if (event->recorded)
        sleep_until(event->done);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    CONTEXT();
    if (!from->recorded || !to->recorded || (from->flags | to->flags) & cudaEventDisableTiming)
        return result(cudaErrorInvalidResourceHandle);
    if (from->done > now() || to->done > now())
        return result(cudaErrorNotReady);
    *ms = (float)(to->done - from->done) / 1e6f;
    return cudaSuccess;
}

/* --- memory --------------------------------------------------------------------------------------------------------*/

typedef struct {
    char *start;
    size_t size;
    enum { ON_DEVICE, PINNED, REGISTERED } kind;
    int device;
} Block;
static void *blocks; /* a tree: blocks that overlap count as equal */
static size_t used[STANDIN_CARDS];

static int compared(const void *one, const void *other)
{
    const Block *a = one, *b = other;
    return a->start + a->size <= b->start ? -1 : b->start + b->size <= a->start ? 1 : 0;
}

/* The block that holds this range or its beginning; call it with the lock. */
static Block *found(const void *pointer, size_t size)
{
    Block wanted = {.start = (char *)pointer, .size = size ? size : 1};
    Block **node = tfind(&wanted, &blocks, compared);
    return node ? *node : NULL;
}

static bool added(void *start, size_t size, int kind, int device)
{
    Block *block = malloc(sizeof *block);
    *block = (Block){start, size, kind, device};
    pthread_mutex_lock(&lock);
    bool fits = *(Block **)tsearch(block, &blocks, compared) == block;
    pthread_mutex_unlock(&lock);
    if (!fits)
        free(block);
    return fits;
}

/* Take a block that starts here out of the tree; its size, or 0. */
static size_t removed(void *start, int kind, int *device)
{
    pthread_mutex_lock(&lock);
    Block *block = found(start, 1);
    size_t size = 0;
    if (block && block->start == start && (int)block->kind == kind) {
        size = block->size;
        if (device)
            *device = block->device;
        tdelete(block, &blocks, compared);
        free(block);
    }
    pthread_mutex_unlock(&lock);
    return size;
}

static size_t rounded(size_t size) { return (size + GRAIN - 1) / GRAIN * GRAIN; }

static void *zeros(size_t size)
{
    if (size < MAPPED) {
        void *memory = aligned_alloc(GRAIN, size);
        return memory ? memset(memory, 0, size) : NULL;
    }
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}
static void released(void *memory, size_t size)
{
    if (size < MAPPED)
        free(memory);
    else
        munmap(memory, size);
}

/* Count memory of a device; false if the device is full. */
static bool taken(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    bool fits = used[device] + size <= memory_size(device);
    if (fits)
        used[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}
static void given(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    used[device] -= size;
    pthread_mutex_unlock(&lock);
}

int standin_device_of(const void *pointer)
{
    pthread_mutex_lock(&lock);
    Block *block = found(pointer, 1);
    int device = block && block->kind == ON_DEVICE ? block->device : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

cudaError_t cudaMalloc(void **memory, size_t size)
{
    CONTEXT();
    *memory = NULL;
    if (!size)
        return cudaSuccess;
    size_t whole = rounded(size);
    if (!taken(current, whole)) {
        standin_log("full %d %zu", current, size);
        return result(cudaErrorMemoryAllocation);
    }
    *memory = zeros(whole);
    added(*memory, whole, ON_DEVICE, current);
    standin_log("malloc %d %zu", current, size);
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory)
{
    if (forked) /* with its caching allocator torch does not call this for a tensor that a child inherits and drops */
        return cudaSuccess;
    CONTEXT();
    int device;
    size_t size = memory ? removed(memory, ON_DEVICE, &device) : 0;
    if (memory && !size)
        return result(cudaErrorInvalidValue);
    if (size) {
        released(memory, size);
        given(device, size);
        standin_log("free %d %zu", device, size);
    }
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **memory, size_t size, cudaStream_t s) { return (void)s, cudaMalloc(memory, size); }
cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) { return (void)stream, cudaFree(memory); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    CONTEXT();
    *total = memory_size(current);
    *available = *total - used[current];
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = (cudaMemPool_t)&defaults[device];
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value)
{
    (void)pool, (void)which;
    return *(uint64_t *)value = 0, cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags)
{
    (void)flags;
    CONTEXT();
    size_t whole = rounded(size ? size : 1);
    *memory = zeros(whole);
    added(*memory, whole, PINNED, current);
    standin_log("pin %zu", size);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **memory, size_t size) { return cudaHostAlloc(memory, size, 0); }
cudaError_t cudaFreeHost(void *memory)
{
    CONTEXT();
    size_t size = memory ? removed(memory, PINNED, NULL) : 0;
    if (memory && !size)
        return result(cudaErrorInvalidValue);
    if (size)
        released(memory, size);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags)
{
    (void)flags;
    CONTEXT();
    if (!memory || !size)
        return result(cudaErrorInvalidValue);
    if (!added(memory, size, REGISTERED, current))
        return result(cudaErrorHostMemoryAlreadyRegistered);
    standin_log("register %zu", size);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *memory)
{
    CONTEXT();
    return result(removed(memory, REGISTERED, NULL) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    return *device = host, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    CONTEXT();
    pthread_mutex_lock(&lock);
    Block *block = found(pointer, 1);
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -1};
    if (block) {
        attributes->type = block->kind == ON_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        attributes->device = block->device;
        attributes->devicePointer = (void *)pointer;
        attributes->hostPointer = block->kind == ON_DEVICE ? NULL : (void *)pointer;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* One end of a copy: 'd' device, 'p' pinned or registered, 'h' other memory of the host, 0 for a range beyond its end. */
static char place(const void *pointer, size_t size)
{
    pthread_mutex_lock(&lock);
    Block *block = found(pointer, 1);
    char letter = !block ? 'h' : block->kind == ON_DEVICE ? 'd' : 'p';
    for (const char *end = (const char *)pointer + size; letter == 'd' && block->start + block->size < end;) {
        Block *next = found(block->start + block->size, 1); /* of a segment that has grown: mapped behind it */
        if (!next || next->kind != ON_DEVICE || next->device != block->device)
            letter = 0;
        else
            block = next;
    }
    pthread_mutex_unlock(&lock);
    return letter;
}

/* Copy and log "copy FROM TO BYTES sync|async"; a copy between a device and memory that is not pinned waits. */
static cudaError_t copied(void *to, const void *from, size_t size, int kind, cudaStream_t stream, bool waits)
{
    CONTEXT();
    if (!size)
        return cudaSuccess;
    char source = place(from, size), target = place(to, size);
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    if (!source || !target || (from_device && source != 'd') || (to_device && target != 'd')) {
        standin_log("bad-copy %c %c %zu", source ? source : '?', target ? target : '?', size);
        return result(cudaErrorInvalidValue);
    }
    memmove(to, from, size);
    bool crosses = (source == 'd') != (target == 'd');
    waits = (waits && (source != 'd' || target != 'd')) || (crosses && (source == 'h' || target == 'h'));
    standin_work(stream, COPY_NS + (int64_t)(size * 1000 / MEGABYTES_PER_S / (crosses ? 1 : 50)));
    standin_log("copy %c %c %zu %s", source, target, size, waits ? "sync" : "async");
    if (waits)
        sleep_until(resolved(stream)->done);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    return copied(to, from, size, (int)kind, NULL, true);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return copied(to, from, size, (int)kind, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream)
{
    (void)there, (void)here;
    return copied(to, from, size, cudaMemcpyDeviceToDevice, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t step, const void *from, size_t pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = copied((char *)to + row * step, (const char *)from + row * pitch, width, (int)kind, stream, false);
    return error;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream)
{
    CONTEXT();
    if (size && place(memory, size) != 'd')
        return result(cudaErrorInvalidValue);
    memset(memory, value, size);
    standin_work(stream, LAUNCH_NS);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *memory, int value, size_t size) { return cudaMemsetAsync(memory, value, size, NULL); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory)
{
    (void)handle, (void)memory;
    return result(cudaErrorNotSupported);
}

/* --- kernels -------------------------------------------------------------------------------------------------------*/

static const void *spin; /* torch.cuda._sleep: its argument is a number of clock cycles */

static int64_t spinning(int64_t cycles)
{
    return (int64_t)((double)cycles * 1e6 / CLOCK_KHZ * atof(standin_option("SPIN", "1")));
}

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread,
                            uint3 *block, dim3 *blocks_, dim3 *grid, int *warp)
{
    (void)handle, (void)device, (void)limit, (void)thread, (void)block, (void)blocks_, (void)grid, (void)warp;
    if (strstr(name, "spin_kernel"))
        spin = host;
    standin_learn(host, name);
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration; /* of a launch by <<<…>>> */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared, *(void **)stream = configuration.stream;
    return cudaSuccess;
}

static cudaError_t launched(dim3 grid, dim3 block, cudaStream_t stream, int64_t nanoseconds)
{
    CONTEXT();
    unsigned threads = block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024)
        return result(cudaErrorInvalidConfiguration);
    if (resolved(stream)->device != current) {
        standin_log("bad-launch on %d by %d", resolved(stream)->device, current);
        return result(cudaErrorInvalidResourceHandle);
    }
    __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    standin_work(stream, nanoseconds);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    (void)shared;
    int64_t time = function == spin ? spinning(*(int64_t *)arguments[0]) : LAUNCH_NS;
    cudaError_t error = launched(grid, block, stream, time);
    if (!error)
        standin_compute(function, grid.y, arguments);
    return error;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    (void)function, (void)arguments;
    return launched(config->gridDim, config->blockDim, config->stream, LAUNCH_NS);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    int major, minor;
    OPENED();
    capability(current, &major, &minor);
    *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
    attributes->ptxVersion = attributes->binaryVersion = major * 10 + minor;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads,
                                                                   size_t shared, unsigned flags)
{
    (void)function, (void)shared, (void)flags;
    *count = threads > 0 && threads < 2048 ? 2048 / threads : 1;
    return cudaSuccess;
}

/* --- the driver interface: Triton's, and what torch asks for by name -----------------------------------------------*/

#define DRIVER(error) ((CUresult)(error)) /* the codes in use here are the same in both interfaces */

static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static void *by_name(const char *name)
{
    char version2[128];
    snprintf(version2, sizeof version2, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, version2);
    if (!function)
        function = dlsym(RTLD_DEFAULT, name);
    return function ? function : (void *)unsupported;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *answer)
{
    (void)flags;
    *function = by_name(name);
    if (answer)
        *answer = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *answer)
{
    (void)version;
    return cudaGetDriverEntryPoint(name, function, flags, answer);
}
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *answer)
{
    (void)version, (void)flags;
    *function = by_name(name);
    if (answer)
        *answer = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return (void)flags, DRIVER(opened()); }
CUresult cuDriverGetVersion(int *version) { return DRIVER(cudaDriverGetVersion(version)); }
CUresult cuGetErrorString(CUresult code, const char **text) { return *text = cudaGetErrorString((cudaError_t)code), CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult code, const char **text) { return *text = cudaGetErrorName((cudaError_t)code), CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return DRIVER(cudaGetDeviceCount(count)); }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, DRIVER(opened()); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{
    return DRIVER(cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)which, device));
}
CUresult cuDeviceGetName(char *text, int room, CUdevice device)
{
    struct cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (!error)
        snprintf(text, (size_t)room, "%s", p.name);
    return DRIVER(error);
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    int card = standin_card(device);
    if (card >= 0)
        standin_uuid(card, (unsigned char *)uuid->bytes);
    return card < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *size, CUdevice device) 
{
    CUresult error = DRIVER(opened());
    return error ? error : (*size = memory_size(device), CUDA_SUCCESS);
}

/* A context is its device. */
static CUcontext context_of(int device) { return (CUcontext)&defaults[device]; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    cudaError_t error = context_on(device);
    if (!error)
        *context = context_of(device);
    return DRIVER(error);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0, *active = !forked && has_context[device];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = !forked && started && has_context[current] ? context_of(current) : NULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context)
{
    return context ? DRIVER(cudaSetDevice((int)((struct CUstream_st *)context - defaults))) : CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) { return *device = current, DRIVER(opened()); }
CUresult cuCtxSynchronize(void) { return DRIVER(cudaDeviceSynchronize()); }
CUresult cuCtxGetLimit(size_t *value, CUlimit which) { return (void)which, *value = 1 << 20, CUDA_SUCCESS; }

CUresult cuCtxSetLimit(CUlimit which, size_t value) { return (void)which, (void)value, CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache wish) { return (void)function, (void)wish, CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    (void)image;
    *module = (CUmodule)defaults;
    return DRIVER(context_on(current));
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values)
{
    (void)n, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *file) { return cuModuleLoadData(module, file); }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)module, (void)name;
    *function = (CUfunction)defaults;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function)
{
    (void)function;
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared)
{
    return DRIVER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads, shared, 0));
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config)
{
    (void)function, (void)config;
    return *count = 1, CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra)
{
    (void)function, (void)shared, (void)arguments, (void)extra;
    return DRIVER(launched((dim3){gx, gy, gz}, (dim3){bx, by, bz}, stream, LAUNCH_NS));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra)
{
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, arguments, extra);
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer)
{
    int device = standin_device_of((void *)pointer);
    if (device < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)value = context_of(device);
    else if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = pointer;
    else if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)value = device;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer)
{
    pthread_mutex_lock(&lock);
    Block *block = found((void *)pointer, 1);
    if (block && base)
        *base = (CUdeviceptr)block->start;
    if (block && size)
        *size = block->size;
    pthread_mutex_unlock(&lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Memory by addresses and handles (expandable_segments). A handle is a number of bytes of a device. */
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f)
{
    (void)p, (void)f;
    return *bytes = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long f)
{
    (void)alignment, (void)wish, (void)f;
    void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *start = (CUdeviceptr)memory;
    return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) { return munmap((void *)start, size), CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p, unsigned long long f)
{
    (void)f;
    cudaError_t error = context_on(p->location.id);
    if (error)
        return DRIVER(error);
    if (!taken(p->location.id, size)) {
        standin_log("full %d %zu", p->location.id, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Block *block = malloc(sizeof *block);
    *block = (Block){NULL, size, ON_DEVICE, p->location.id};
    *handle = (CUmemGenericAllocationHandle)block;
    standin_log("malloc %d %zu", block->device, size);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    Block *block = (Block *)handle;
    given(block->device, block->size);
    standin_log("free %d %zu", block->device, block->size);
    free(block);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long f)
{
    (void)offset, (void)f;
    mprotect((void *)start, size, PROT_READ | PROT_WRITE);
    return added((void *)start, size, ON_DEVICE, ((Block *)handle)->device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size)
{
    for (size_t done = 0, part; done < size; done += part)
        if (!(part = removed((char *)start + done, ON_DEVICE, NULL)))
            return CUDA_ERROR_INVALID_VALUE;
    madvise((void *)start, size, MADV_DONTNEED);
    mprotect((void *)start, size, PROT_NONE);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count)
{
    (void)start, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

/* torch looks all of these up by name before it uses any: to share memory between processes, and NVLink's multicast. */
#define UNSUPPORTED(name) \
    CUresult unsupported_##name(void) __asm__(#name); \
    CUresult unsupported_##name(void) { return CUDA_ERROR_NOT_SUPPORTED; }
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
UNSUPPORTED(cuMemsetD32Async)
UNSUPPORTED(cuStreamWriteValue32)
UNSUPPORTED(cuMulticastAddDevice)
UNSUPPORTED(cuMulticastBindMem)
UNSUPPORTED(cuMulticastCreate)

/* --- cuBLAS, cuDNN -------------------------------------------------------------------------------------------------*/

/* Handles, layouts and the like are never read here: any address will do. */
#define MAKES(name) \
    int name(void **made); \
    int name(void **made) { return *made = defaults, 0; }
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)

int cublasCreate_v2(void **handle);
int cublasCreate_v2(void **handle) { return *handle = defaults, context_on(current) ? 1 : 0; }
int cublasGetMathMode(void *handle, int *mode);
int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode);
int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }

struct algorithm {
    uint64_t description[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, struct algorithm *, int *);
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct algorithm *found_, int *count)
{
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(found_, 0, sizeof *found_);
    return *count = 1, 0;
}

/* at::Context::userEnabledCuDNN() and userEnabledCuDNNSDP(): torch then takes its own kernels. */
bool _ZNK2at7Context16userEnabledCuDNNEv(void);
bool _ZNK2at7Context16userEnabledCuDNNEv(void) { return false; }
bool _ZNK2at7Context19userEnabledCuDNNSDPEv(void);
bool _ZNK2at7Context19userEnabledCuDNNSDPEv(void) { return false; }
