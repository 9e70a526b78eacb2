// A stand-in for libamdhip64 on host memory. Streams run at once, so the order of work is the order of the calls.
//
// Each call is written to a log, and standin_fail makes the next call of one function fail. Memory, streams and kernels
// belong to the device that is selected when they are made: using them while another is selected is an error here.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>

#ifdef WITH_HIP_HEADERS
#include <hip/hip_runtime_api.h>
#else
typedef int hipError_t, hipDevice_t, hipDeviceAttribute_t, hipFunction_attribute, hipStreamCaptureStatus;
typedef struct ihipStream_t* hipStream_t;
typedef struct ihipEvent_t* hipEvent_t;
typedef struct ihipModule_t* hipModule_t;
typedef struct ihipModuleSymbol_t* hipFunction_t;
typedef struct ihipGraph* hipGraph_t;
typedef struct hipGraphNode* hipGraphNode_t;
typedef void* hipDeviceptr_t;
struct hipDeviceProp_t { char name[256]; char before[1000]; char gcnArchName[256]; char after[200]; };
#endif

typedef void Launcher(unsigned, unsigned, unsigned, unsigned, void**);
struct ihipStream_t { int device, capturing; };
struct ihipEvent_t { double time; bool recorded; };
struct ihipModule_t { int device; void* library; };
struct ihipModuleSymbol_t { int device; Launcher* launcher; };

namespace {

struct Model { const char *name, *arch; int wave, shared, units; };
const Model models[] = {
    {"Stand-in gfx1100", "gfx1100", 32, 65536, 48},
    {"Stand-in gfx942", "gfx942:sramecc+:xnack-", 64, 65536, 304},
    {"Stand-in gfx1201", "gfx1201", 32, 65536, 32},
    {"Stand-in gfx90a", "gfx90a:sramecc+:xnack-", 64, 65536, 104},
    {"Stand-in gfx1030", "gfx1030", 32, 65536, 40},
    {"Stand-in gfx950", "gfx950:sramecc+:xnack-", 64, 163840, 256},
    {"Stand-in gfx908", "gfx908:sramecc+:xnack-", 64, 65536, 120},
    {"Stand-in gfx1151", "gfx1151", 32, 65536, 20},
};

std::recursive_mutex lock;
std::string calls, fail_name;
int fail_code, fail_after, devices = sizeof models / sizeof *models, sticky;
size_t limit = (size_t)1 << 32, used;
std::map<void*, size_t> allocations;
std::map<void*, ihipModuleSymbol_t*> symbols;
int live_modules, live_streams, live_events;
thread_local int selected, last;  // last: the error that hipGetLastError tells, as ROCm 7 keeps it

int called(const char* name)
{
    calls += std::string(name) + " ";
    if (fail_code && fail_name == name && fail_after-- == 0) {
        const int code = fail_code;
        fail_code = 0;
        if (code >= 700) sticky = code;
        return last = code;
    }
    return 0;
}

#define ENTER                                                  \
    std::lock_guard<std::recursive_mutex> guard(lock);         \
    if (const int c = called(__func__)) return (hipError_t)c;
#define WORK ENTER if (sticky) return (hipError_t)sticky;
const hipError_t ok = (hipError_t)0, invalid = (hipError_t)1, memory = (hipError_t)2, no_device = (hipError_t)101;
const hipError_t invalid_image = (hipError_t)200, wrong = (hipError_t)400, not_found = (hipError_t)500;

hipError_t on(hipStream_t stream) { return stream && stream->device != selected ? wrong : ok; }

double now()
{
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// -- for tests ----------------------------------------------------------------------------------------------------

const char* standin_log() { return calls.c_str(); }
void standin_clear_log() { calls.clear(); }
void standin_fail(const char* name, int code, int after) { fail_name = name, fail_code = code, fail_after = after; }
void standin_recover() { sticky = 0, fail_code = 0; }
void standin_devices(int count) { devices = count; }
void standin_memory(size_t bytes) { limit = bytes; }
size_t standin_memory_used() { return used; }
int standin_last() { return last; }
int standin_live() { return live_modules + live_streams + live_events; }
void standin_capture(hipStream_t stream, int on) { stream->capturing = on; }

// -- devices ------------------------------------------------------------------------------------------------------

hipError_t hipInit(unsigned) { ENTER return ok; }
hipError_t hipRuntimeGetVersion(int* version) { ENTER *version = 60342131; return ok; }
const char* hipGetErrorName(hipError_t error)
{
    switch ((int)error) {
    case 1: return "hipErrorInvalidValue";
    case 2: return "hipErrorOutOfMemory";
    case 101: return "hipErrorInvalidDevice";
    case 200: return "hipErrorInvalidImage";
    case 400: return "hipErrorInvalidHandle";
    case 500: return "hipErrorNotFound";
    case 700: return "hipErrorIllegalAddress";
    case 719: return "hipErrorLaunchFailure";
    default: return "hipErrorUnknown";
    }
}
const char* hipGetErrorString(hipError_t) { return "what happened"; }
hipError_t hipGetLastError() { const int code = last; last = 0; return (hipError_t)code; }
hipError_t hipGetDeviceCount(int* count) { ENTER *count = devices; return ok; }
hipError_t hipGetDevice(int* device) { ENTER *device = selected; return ok; }
hipError_t hipSetDevice(int device) { ENTER if (device < 0 || device >= devices) return no_device; selected = device; return ok; }
hipError_t hipDeviceGetName(char* name, int length, hipDevice_t device)
{
    ENTER
    std::snprintf(name, length, "%s", models[device].name);
    return ok;
}
hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t) { ENTER *bytes = limit; return ok; }
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device)
{
    ENTER
    const Model& model = models[device];
    switch ((int)attribute) {
    case 16: *value = model.units == 20; return ok;
    case 19: *value = 4 << 20; return ok;
    case 29: *value = 2147483647; return ok;
    case 30: case 31: *value = 65536; return ok;
    case 56: *value = 1024; return ok;
    case 63: *value = model.units; return ok;
    case 72: *value = 65536; return ok;
    case 74: case 10002: *value = model.shared; return ok;
    case 87: *value = model.wave; return ok;
    default: return last = invalid, invalid;
    }
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device)
{
    ENTER
    std::memset(properties, 0, sizeof *properties);
    std::strcpy(properties->name, models[device].name);
    std::strcpy(properties->gcnArchName, models[device].arch);
    return ok;
}
hipError_t hipDeviceSynchronize() { WORK return ok; }

// -- memory -------------------------------------------------------------------------------------------------------

hipError_t hipMalloc(void** pointer, size_t bytes)
{
    WORK
    if (used + bytes > limit || posix_memalign(pointer, 4096, bytes)) return last = memory, memory;
    std::memset(*pointer, 0xA5, bytes);
    allocations[*pointer] = bytes;
    used += bytes;
    return ok;
}
hipError_t hipFree(void* pointer)
{
    ENTER
    if (!allocations.count(pointer)) return invalid;
    used -= allocations[pointer];
    allocations.erase(pointer);
    std::free(pointer);
    return ok;
}
hipError_t hipMemGetInfo(size_t* free, size_t* total) { WORK *free = limit - used, *total = limit; return ok; }
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, void* from, size_t bytes, hipStream_t stream)
{
    WORK
    std::memcpy(to, from, bytes);
    return on(stream);
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t bytes, hipStream_t stream)
{
    WORK
    std::memcpy(to, from, bytes);
    return on(stream);
}
hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t count, hipStream_t stream)
{
    WORK
    for (size_t i = 0; i < count; i++) ((int*)to)[i] = value;
    return on(stream);
}

// -- streams and events -------------------------------------------------------------------------------------------

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned)
{
    WORK
    *stream = new ihipStream_t{selected, 0};
    live_streams++;
    return ok;
}
hipError_t hipStreamDestroy(hipStream_t stream) { ENTER delete stream; live_streams--; return ok; }
hipError_t hipStreamSynchronize(hipStream_t stream) { WORK return on(stream); }
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t event, unsigned) { WORK return event->recorded ? ok : invalid; }
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status)
{
    WORK
    *status = (hipStreamCaptureStatus)(stream ? stream->capturing : 0);
    return ok;
}
hipError_t hipStreamGetCaptureInfo_v2(
    hipStream_t stream, hipStreamCaptureStatus* status, unsigned long long* id, hipGraph_t*, const hipGraphNode_t**,
    size_t*)
{
    WORK
    *status = (hipStreamCaptureStatus)(stream ? stream->capturing : 0);
    *id = 7;
    return ok;
}
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned)
{
    WORK
    *event = new ihipEvent_t{0, false};
    live_events++;
    return ok;
}
hipError_t hipEventDestroy(hipEvent_t event) { ENTER delete event; live_events--; return ok; }
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
    WORK
    *event = {now(), true};
    return on(stream);
}
hipError_t hipEventSynchronize(hipEvent_t) { WORK return ok; }
hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t stop)
{
    WORK
    *milliseconds = (float)(stop->time - start->time);
    return ok;
}

// -- kernels ------------------------------------------------------------------------------------------------------

hipError_t hipModuleLoadData(hipModule_t* module, const void* image)
{
    WORK
    // The size of an ELF file: its section headers come last.
    const unsigned char* bytes = (const unsigned char*)image;
    if (std::memcmp(bytes, "\177ELF", 4)) return invalid_image;
    uint64_t headers;
    uint16_t size, count;
    std::memcpy(&headers, bytes + 40, 8), std::memcpy(&size, bytes + 58, 2), std::memcpy(&count, bytes + 60, 2);
    char path[] = "/tmp/hip-standin-XXXXXX";
    const int file = mkstemp(path);
    const ssize_t total = headers + (uint64_t)size * count, written = write(file, image, total);
    close(file);
    void* library = written == total ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path);
    if (!library) return invalid_image;
    *module = new ihipModule_t{selected, library};
    live_modules++;
    return ok;
}
hipError_t hipModuleUnload(hipModule_t module)
{
    ENTER
    dlclose(module->library);
    delete module;
    live_modules--;
    return ok;
}
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name)
{
    WORK
    void* launcher = dlsym(module->library, (std::string("standin_launch_") + name).c_str());
    if (!launcher) return not_found;
    ihipModuleSymbol_t*& symbol = symbols[launcher];
    delete symbol;
    *function = symbol = new ihipModuleSymbol_t{module->device, (Launcher*)launcher};
    return ok;
}
hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute attribute, hipFunction_t)
{
    WORK
    *value = attribute == 0 ? 1024 : 32;
    return ok;
}
hipError_t hipModuleLaunchKernel(
    hipFunction_t function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
    hipStream_t stream, void** table, void**)
{
    WORK
    if (function->device != selected) return wrong;
    if (const hipError_t code = on(stream)) return code;
    if (!x || !y || !z || !threads) return invalid;
    function->launcher(x, y, z, threads, table);
    return ok;
}

}
