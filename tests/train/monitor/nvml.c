/* Stands for NVIDIA's driver where there is none: a libnvidia-ml.so.1 that tells what the file $NVML_STAND_IN says, a
 * line a GPU: uuid answers use memory_used memory_size celsius slowdown milliwatts limit corrected uncorrected reasons
 * pid bytes. Read anew at each question, so that a test can change it; "answers" 0 is a GPU that fell off the bus, 2 one
 * that is cut into parts (MIG) seen from a container, which may not ask for the memory of the whole. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7, LOST = 15 };
struct gpu {
    char uuid[96];
    unsigned answers, use;
    unsigned long long used, size;
    unsigned celsius, slowdown, milliwatts, limit;
    unsigned long long corrected, uncorrected, reasons;
    unsigned pid;
    unsigned long long bytes;
};

static int look(unsigned number, struct gpu *gpu)
{
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    unsigned line = 0;
    int found = 0;
    if (!file)
        return 0;
    while (fscanf(file, "%95s %u %u %llu %llu %u %u %u %u %llu %llu %llu %u %llu", gpu->uuid, &gpu->answers, &gpu->use,
                  &gpu->used, &gpu->size, &gpu->celsius, &gpu->slowdown, &gpu->milliwatts, &gpu->limit,
                  &gpu->corrected, &gpu->uncorrected, &gpu->reasons, &gpu->pid, &gpu->bytes) == 14)
        if (line++ == number) {
            found = 1;
            break;
        }
    fclose(file);
    return found;
}
static unsigned count(void)
{
    struct gpu gpu;
    unsigned n = 0;
    while (look(n, &gpu))
        n++;
    return n;
}
#define ASK(handle) \
    struct gpu gpu; \
    if (!look((unsigned)(size_t)(handle) - 1, &gpu) || !gpu.answers) \
        return LOST

const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "error"; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return count() ? OK : 9; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle)
{
    struct gpu gpu;
    if (!look(number, &gpu))
        return INVALID;
    if (getenv("NVML_HANGS") && !access(getenv("NVML_HANGS"), F_OK))
        pause();
    *handle = (void *)(size_t)(number + 1);
    return gpu.answers ? OK : LOST;
}
int nvmlDeviceGetUUID(void *h, char *text, unsigned room) { ASK(h); snprintf(text, room, "%s", gpu.uuid); return OK; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { ASK(h); *major = 9, *minor = 0; return OK; }
int nvmlDeviceGetName(void *h, char *text, unsigned room) { ASK(h); snprintf(text, room, "Stand-in \"A\""); return OK; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m)
{
    if (getenv("NVML_HANGS") && !access(getenv("NVML_HANGS"), F_OK))
        pause();
    ASK(h);
    if (gpu.answers == 2)
        return NO_PERMISSION;
    m[0] = gpu.size, m[1] = gpu.size - gpu.used, m[2] = gpu.used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *u) { ASK(h); u[0] = gpu.use, u[1] = 0; return OK; }
int nvmlDeviceGetTemperature(void *h, int s, unsigned *t) { ASK(h); (void)s; *t = gpu.celsius; return OK; }
int nvmlDeviceGetTemperatureThreshold(void *h, int k, unsigned *t)
{
    ASK(h);
    (void)k;
    *t = gpu.slowdown;
    return gpu.slowdown ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *w) { ASK(h); *w = gpu.milliwatts; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *w) { ASK(h); *w = gpu.limit; return OK; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int c, unsigned long long *n)
{
    ASK(h);
    (void)c;
    *n = kind ? gpu.uncorrected : gpu.corrected;
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *r) { ASK(h); *r = gpu.reasons; return OK; }
struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *p)
{
    ASK(h);
    if (!gpu.pid) {
        *n = 0;
        return OK;
    }
    if (!p || *n < 1) {
        *n = 1;
        return INSUFFICIENT_SIZE;
    }
    *n = 1;
    p[0].pid = gpu.pid, p[0].bytes = gpu.bytes, p[0].instance = p[0].compute = 0;
    return OK;
}
