/* A stand-in for NVIDIA's libnvidia-ml.so.1, whose answers a text file scripts.
 *
 * The environment variable FAKE_NVML names the file, which is read at each call. A line is
 * "<key> <value>". A key of device 0 begins with "0.": "0.temperature 61" is a figure, and
 * "0.nvmlDeviceGetPowerUsage 999" makes that function return the error 999. A figure without a line
 * is not supported. "0.xids 79 48" are the XID events that have occurred, oldest first.
 *
 * The types and the order of arguments are those of nvml.h.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10
};
enum { MAX_DEVICES = 8, MAX_LINKS = 36, LINE = 1024 };

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef union {
    double dVal;
    int siVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    signed long long sllVal;
    unsigned short usVal;
} nvmlValue_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType, nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct {
    void *device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct { unsigned int version; int marginTemperature; } nvmlMarginTemperature_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct { int device; unsigned int seen; unsigned long long types; } event_set_t;

/* What the tests look up: nothing may be left open. */
int fake_nvml_opened = 0;
int fake_nvml_event_sets = 0;

static int devices[MAX_DEVICES];

/* Find the text behind a key, or return 0. */
static int find(const char *key, char *text) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    size_t length = strlen(key);
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) || line[length] != ' ') continue;
        line[strcspn(line, "\n")] = 0;
        strcpy(text, line + length + 1);
        found = 1;
    }
    fclose(file);
    return found;
}

static int of_device(void *device, const char *name, char *text) {
    char key[LINE];
    snprintf(key, sizeof key, "%d.%s", *(int *)device, name);
    return find(key, text);
}

/* The error that the script gives for a function, or for every function if the device is lost. */
static int refusal(void *device, const char *function) {
    char text[LINE];
    if (!fake_nvml_opened) return UNINITIALIZED;
    if (of_device(device, "lost", text) || of_device(device, function, text)) return atoi(text);
    return SUCCESS;
}

static int number(void *device, const char *function, const char *name, long long *value) {
    char text[LINE];
    int error = refusal(device, function);
    if (error) return error;
    if (!of_device(device, name, text)) return NOT_SUPPORTED;
    *value = strtoll(text, NULL, 0);
    return SUCCESS;
}

#define NUMBER(type, target, ...)                                 \
    do {                                                          \
        char name_[LINE];                                         \
        long long value_ = 0;                                     \
        snprintf(name_, sizeof name_, __VA_ARGS__);               \
        int error_ = number(device, __func__, name_, &value_);    \
        if (error_) return error_;                                \
        *(target) = (type)value_;                                 \
    } while (0)

static int text_of(void *device, const char *function, const char *name, char *out, unsigned size) {
    char text[LINE];
    int error = refusal(device, function);
    if (error) return error;
    if (!of_device(device, name, text)) return NOT_SUPPORTED;
    snprintf(out, size, "%s", text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    for (int i = 0; i < MAX_DEVICES; i++) devices[i] = i;
    fake_nvml_opened++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    fake_nvml_opened--;
    return SUCCESS;
}

const char *nvmlErrorString(int error) {
    (void)error;
    return "scripted error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    char text[LINE];
    if (!find("driver", text)) return NOT_SUPPORTED;
    snprintf(version, size, "%s", text);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    char text[LINE];
    if (!find("cuda_version", text)) return NOT_SUPPORTED;
    *version = atoi(text);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    char text[LINE];
    *count = find("devices", text) ? (unsigned)atoi(text) : 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    unsigned int count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned int count;
    char text[LINE];
    nvmlDeviceGetCount_v2(&count);
    for (unsigned int i = 0; i < count; i++)
        if (of_device(&devices[i], "uuid", text) && !strcmp(text, uuid)) {
            *device = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int size) {
    return text_of(device, __func__, "uuid", uuid, size);
}

int nvmlDeviceGetName(void *device, char *name, unsigned int size) {
    return text_of(device, __func__, "name", name, size);
}

int nvmlDeviceGetPciInfo_v3(void *device, nvmlPciInfo_t *info) {
    memset(info, 0, sizeof *info);
    return text_of(device, __func__, "pci_bus_id", info->busId, sizeof info->busId);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **parent) {
    int index = 0;
    NUMBER(int, &index, "parent");
    *parent = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *rates) {
    NUMBER(unsigned int, &rates->gpu, "utilization");
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    NUMBER(unsigned int, milliwatts, "power");
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    NUMBER(unsigned int, celsius, "temperature");
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *device, int threshold, unsigned int *celsius) {
    NUMBER(unsigned int, celsius, "threshold%d", threshold);
    return SUCCESS;
}

int nvmlDeviceGetMarginTemperature(void *device, nvmlMarginTemperature_t *margin) {
    if (margin->version != (sizeof *margin | 1u << 24)) return 25; /* version mismatch */
    NUMBER(int, &margin->marginTemperature, "margin");
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *megahertz) {
    NUMBER(unsigned int, megahertz, "clock%d", kind);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    NUMBER(unsigned long long, millijoules, "energy");
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    NUMBER(unsigned long long, reasons, "reasons");
    return SUCCESS;
}

int nvmlDeviceGetSupportedClocksEventReasons(void *device, unsigned long long *reasons) {
    NUMBER(unsigned long long, reasons, "supported_reasons");
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    NUMBER(unsigned long long, reasons, "throttle_reasons");
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    NUMBER(unsigned long long, count, "ecc%d.%d", kind, counter);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(
    void *device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
    unsigned int *failed
) {
    NUMBER(unsigned int, corrected, "rows_corrected");
    NUMBER(unsigned int, uncorrected, "rows_uncorrected");
    NUMBER(unsigned int, pending, "remap_pending");
    NUMBER(unsigned int, failed, "remap_failed");
    return SUCCESS;
}

int nvmlDeviceGetPcieReplayCounter(void *device, unsigned int *count) {
    NUMBER(unsigned int, count, "pcie_replays");
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(
    void *device, unsigned int link, int counter, unsigned long long *count
) {
    if (link >= MAX_LINKS) return INVALID_ARGUMENT;
    NUMBER(unsigned long long, count, "link%u.%d", link, counter);
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(void *device, int count, nvmlFieldValue_t *values) {
    int error = refusal(device, __func__);
    if (error) return error;
    for (int i = 0; i < count; i++) {
        char name[LINE], text[LINE];
        snprintf(name, sizeof name, "field%u.%u", values[i].fieldId, values[i].scopeId);
        if (!of_device(device, name, text)) {
            values[i].nvmlReturn = NOT_SUPPORTED;
            continue;
        }
        values[i].nvmlReturn = SUCCESS;
        values[i].valueType = text[0] == '-' ? 5 : 3; /* signed int, unsigned long long */
        if (text[0] == '-')
            values[i].value.siVal = atoi(text);
        else
            values[i].value.ullVal = strtoull(text, NULL, 0);
    }
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    NUMBER(unsigned long long, types, "event_types");
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
    *set = calloc(1, sizeof(event_set_t));
    ((event_set_t *)*set)->device = -1;
    fake_nvml_event_sets++;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) {
    free(set);
    fake_nvml_event_sets--;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    int error = refusal(device, __func__);
    if (error) return error;
    ((event_set_t *)set)->device = *(int *)device;
    ((event_set_t *)set)->types = types;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, nvmlEventData_t *data, unsigned int milliseconds) {
    event_set_t *events = set;
    char text[LINE];
    char *rest = NULL;
    memset(data, 0, sizeof *data);
    if (of_device(&devices[events->device], "xids", text)) {
        char *word = strtok_r(text, " ", &rest);
        for (unsigned int i = 0; word && i < events->seen; i++) word = strtok_r(NULL, " ", &rest);
        if (word && events->types & 8) {
            events->seen++;
            data->device = &devices[events->device];
            data->eventType = 8; /* XidCriticalError */
            data->eventData = strtoull(word, NULL, 10);
            return SUCCESS;
        }
    }
    struct timespec pause = {milliseconds / 1000, (milliseconds % 1000) * 1000000L};
    nanosleep(&pause, NULL);
    return TIMEOUT;
}

int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
    NUMBER(unsigned long long, &memory->total, "memory_total");
    NUMBER(unsigned long long, &memory->used, "memory_used");
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* At most one process. */
int nvmlDeviceGetComputeRunningProcesses_v3(
    void *device, unsigned int *count, nvmlProcessInfo_t *processes) {
    unsigned int size = *count;
    long long pid = 0;
    int error = number(device, __func__, "process", &pid);
    if (error && error != NOT_SUPPORTED) return error;
    *count = pid != 0;
    if (*count > size) return INSUFFICIENT_SIZE;
    if (*count) memset(processes, 0, sizeof *processes), processes->pid = (unsigned)pid;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(void *device, unsigned int type, unsigned int *mhz) {
    NUMBER(unsigned, mhz, "max_clock%u", type);
    return SUCCESS;
}

int nvmlDeviceGetMemoryBusWidth(void *device, unsigned int *bits) {
    NUMBER(unsigned, bits, "bus_width");
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned int *generation) {
    NUMBER(unsigned, generation, "pcie_generation");
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned int *generation) {
    NUMBER(unsigned, generation, "pcie_max_generation");
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned int *lanes) {
    NUMBER(unsigned, lanes, "pcie_lanes");
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned int *lanes) {
    NUMBER(unsigned, lanes, "pcie_max_lanes");
    return SUCCESS;
}
