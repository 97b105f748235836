/* Stands in for the part of NVIDIA's driver that tells of GPUs: a libnvidia-ml.so.1 with the GPUs of cards.h. */
#include <unistd.h>

#include "cards.h"

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NO_DRIVER = 9, LOST = 15 };

static unsigned count_cards(void)
{
    struct card card;
    unsigned count = 0;
    while (read_card(count, &card))
        count++;
    return count;
}
static void may_hang(void)
{
    if (getenv("STANDIN_HANGS") && !access(getenv("STANDIN_HANGS"), F_OK))
        pause();
}
/* A handle is a UUID, and stays the card's when others vanish. */
static void *handle_of(const struct card *card)
{
    static char known[64][sizeof card->uuid];
    int n = 0;
    while (n < 63 && *known[n] && strcmp(known[n], card->uuid))
        n++;
    return strcpy(known[n], card->uuid);
}
static int ask(const char *handle, struct card *card)
{
    unsigned number = 0;
    while (read_card(number, card) && strcmp(card->uuid, handle))
        number++;
    return read_card(number, card) && card->answers;
}
#define ASK(handle) \
    struct card card; \
    if (!ask(handle, &card)) \
        return LOST

const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NO_DRIVER ? "Driver Not Loaded" : "error"; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return count_cards() ? OK : NO_DRIVER; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12060; return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned room) { snprintf(text, room, "560.35.05"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = count_cards(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle)
{
    struct card card;
    if (!read_card(number, &card))
        return INVALID;
    may_hang();
    *handle = handle_of(&card);
    return card.answers ? OK : LOST;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    struct card card;
    for (unsigned number = 0; read_card(number, &card); number++)
        if (!strcmp(card.uuid, uuid))
            return nvmlDeviceGetHandleByIndex_v2(number, handle);
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(void *h, char *text, unsigned room) { ASK(h); snprintf(text, room, "%s", card.uuid); return OK; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor)
{
    ASK(h);
    *major = card.major, *minor = card.minor;
    return OK;
}
int nvmlDeviceGetName(void *h, char *text, unsigned room) { ASK(h); snprintf(text, room, "%s", card.name); return OK; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m)
{
    may_hang();
    ASK(h);
    if (card.answers == 2)
        return NO_PERMISSION;
    m[0] = card.size, m[1] = card.size - card.used, m[2] = card.used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *u) { ASK(h); u[0] = card.use, u[1] = 0; return OK; }
int nvmlDeviceGetTemperature(void *h, int s, unsigned *t) { ASK(h); (void)s; *t = card.celsius; return OK; }
int nvmlDeviceGetTemperatureThreshold(void *h, int k, unsigned *t)
{
    ASK(h);
    (void)k;
    *t = card.slowdown;
    return card.slowdown ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *w) { ASK(h); *w = card.milliwatts; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *w) { ASK(h); *w = card.limit; return OK; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int c, unsigned long long *n)
{
    ASK(h);
    (void)c;
    *n = kind ? card.uncorrected : card.corrected;
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *r) { ASK(h); *r = card.reasons; return OK; }
int nvmlDeviceGetComputeMode(void *h, unsigned *mode) { ASK(h); *mode = card.mode; return OK; }
int nvmlDeviceGetPersistenceMode(void *h, unsigned *mode) { ASK(h); *mode = card.persistence; return OK; }
struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *p)
{
    ASK(h);
    if (!card.pid) {
        *n = 0;
        return OK;
    }
    if (!p || *n < 1) {
        *n = 1;
        return INSUFFICIENT_SIZE;
    }
    *n = 1;
    p[0].pid = card.pid, p[0].bytes = card.bytes, p[0].instance = p[0].compute = 0;
    return OK;
}

/* torch's allocator looks these up, and calls the first two when memory is out. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    unsigned place = 0; /* 0000:0N:00.0, from 1, as cuda.c tells it */
    return sscanf(bus, "%*x:%x", &place) == 1 ? nvmlDeviceGetHandleByIndex_v2(place - 1, handle) : INVALID;
}
int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *p) { ASK(h); (void)p; *n = 0; return OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *type) { (void)h, (void)link, (void)type; return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, void *pci) { (void)h, (void)link, (void)pci; return NOT_SUPPORTED; }
