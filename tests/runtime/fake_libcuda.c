/* A stand-in for libcuda on host memory, for tests/runtime/test_cuda_runtime.py.
 *
 * Streams run at once, so every order of work is the order of the calls. Each call is written to a log, calls that need
 * a current context refuse to work without one, and fake_fail makes the next call of one entry point fail.
 * With -DWITH_CUDA_H the definitions are checked against the real header.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef WITH_CUDA_H
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUfunction_attribute, CUjit_option;
typedef int CUstreamCaptureStatus;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct { int id; char pad[4]; union { char pad[64]; int programmaticStreamSerializationAllowed; } value; } CUlaunchAttribute;
typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef struct { _Alignas(128) uint64_t opaque[16]; } CUtensorMap;
typedef int CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion;
typedef int CUtensorMapFloatOOBfill;
#endif

#define CONTEXT ((CUcontext)0x1000)
#define MAX_ALLOCATIONS 4096

struct CUmod_st { int parameters, tensors; };
struct CUfunc_st { struct CUmod_st *module; char name[64]; int attributes[16]; };
struct CUstream_st { int capturing; };
struct CUevent_st { unsigned flags; int recorded; };

static char call_log[1 << 20];
static size_t log_length;
static char fail_name[64];
static int fail_code, fail_after, device_count = 1, retained, sticky;
static size_t memory_limit = (size_t)1 << 30, memory_used;
static struct { void *pointer; size_t size; } allocations[MAX_ALLOCATIONS];
static __thread CUcontext stack[8];
static __thread int depth;

/* What the last launch was given. */
static struct {
    uint64_t grid[3], block[3], shared, stream, values[16], early, tensors[4][16];
    int parameters;
} last;

static int called(const char *name, int needs_context)
{
    size_t length = strlen(name);
    if (log_length + length + 2 < sizeof call_log) {
        memcpy(call_log + log_length, name, length);
        log_length += length;
        call_log[log_length++] = ' ';
        call_log[log_length] = 0;
    }
    if (fail_code && strcmp(name, fail_name) == 0) {
        if (fail_after == 0) {
            int code = fail_code;
            fail_code = 0;
            if (code >= 700) sticky = code;
            return code;
        }
        fail_after--;
    }
    if (needs_context && (depth == 0 || stack[depth - 1] != CONTEXT)) return 201;
    return needs_context ? sticky : 0;
}

#define ENTER(needs_context) do { int c = called(__func__, needs_context); if (c) return (CUresult)c; } while (0)
#define OK ((CUresult)0)

/* -- for the test -------------------------------------------------------------------------------------------------- */

const char *fake_log(void) { return call_log; }
void fake_clear_log(void) { log_length = 0; call_log[0] = 0; }
void fake_fail(const char *name, int code, int after)
{
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_code = code;
    fail_after = after;
}
void fake_devices(int count) { device_count = count; }
void fake_memory(size_t bytes) { memory_limit = bytes; }
size_t fake_memory_used(void) { return memory_used; }
int fake_retained(void) { return retained; }
int fake_depth(void) { return depth; }
void fake_push_other(void) { stack[depth++] = (CUcontext)0x2000; }
void fake_push_primary(void) { stack[depth++] = CONTEXT; }
void fake_pop(void) { depth--; }
void fake_capture(CUstream stream, int on) { stream->capturing = on; }
const uint64_t *fake_last(void) { return (const uint64_t *)&last; }
int fake_function_attribute(CUfunction function, int attribute) { return function->attributes[attribute]; }

/* -- the driver ---------------------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags) { (void)flags; ENTER(0); return OK; }
CUresult cuDriverGetVersion(int *version) { ENTER(0); *version = 13000; return OK; }

CUresult cuGetErrorName(CUresult error, const char **text)
{
    switch ((int)error) {
    case 1: *text = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case 2: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case 100: *text = "CUDA_ERROR_NO_DEVICE"; return OK;
    case 218: *text = "CUDA_ERROR_INVALID_PTX"; return OK;
    case 500: *text = "CUDA_ERROR_NOT_FOUND"; return OK;
    case 700: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; return OK;
    case 701: *text = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; return OK;
    default: *text = NULL; return (CUresult)1;
    }
}
CUresult cuGetErrorString(CUresult error, const char **text) { (void)error; *text = "what happened"; return OK; }

CUresult cuDeviceGetCount(int *count) { ENTER(0); *count = device_count; return OK; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { ENTER(0); *device = ordinal; return OK; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(0);
    snprintf(name, (size_t)length, "Fake H200 %d", (int)device);
    return OK;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { (void)device; ENTER(0); *bytes = memory_limit; return OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER(0);
    switch ((int)attribute) {
    case 1: *value = 1024; return OK;
    case 5: *value = 2147483647; return OK;
    case 6: case 7: *value = 65535; return OK;
    case 8: *value = 49152; return OK;
    case 16: *value = 132; return OK;
    case 18: *value = 0; return OK;
    case 39: *value = 2048; return OK;
    case 75: *value = device == 1 ? 7 : 9; return OK;
    case 76: *value = device == 1 ? 5 : 0; return OK;
    case 81: *value = 233472; return OK;
    case 82: *value = 65536; return OK;
    case 97: *value = 232448; return OK;
    case 111: *value = 1024; return OK;
    default: return (CUresult)1;
    }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    (void)device;
    ENTER(0);
    retained++;
    *context = CONTEXT;
    return OK;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { (void)device; ENTER(0); retained--; return OK; }
CUresult cuCtxGetCurrent(CUcontext *context) { ENTER(0); *context = depth ? stack[depth - 1] : NULL; return OK; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { ENTER(0); stack[depth++] = context; return OK; }
CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(0);
    if (depth == 0) return (CUresult)201;
    *context = stack[--depth];
    return OK;
}
CUresult cuCtxSynchronize(void) { ENTER(1); return OK; }

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    ENTER(1);
    if (memory_used + bytes > memory_limit) return (CUresult)2;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (!allocations[i].pointer) {
            allocations[i].pointer = malloc(bytes);
            allocations[i].size = bytes;
            memory_used += bytes;
            *pointer = (CUdeviceptr)(uintptr_t)allocations[i].pointer;
            return OK;
        }
    return (CUresult)2;
}
CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    ENTER(1);
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].pointer == (void *)(uintptr_t)pointer) {
            free(allocations[i].pointer);
            allocations[i].pointer = NULL;
            memory_used -= allocations[i].size;
            return OK;
        }
    return (CUresult)1;
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER(1);
    *free_bytes = memory_limit - memory_used;
    *total = memory_limit;
    return OK;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    (void)stream;
    ENTER(1);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return OK;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    ENTER(1);
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return OK;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
    (void)to, (void)value, (void)count, (void)stream;
    ENTER(1);
    return OK;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER(1);
    if (flags != 1) return (CUresult)1;
    *stream = calloc(1, sizeof **stream);
    return OK;
}
CUresult cuStreamDestroy_v2(CUstream stream) { ENTER(1); free(stream); return OK; }
CUresult cuStreamSynchronize(CUstream stream) { (void)stream; ENTER(1); return OK; }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(1);
    if (stream && stream->capturing) return (CUresult)905;
    return (CUresult)(flags != 0 || !event->recorded);
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    ENTER(1);
    *status = stream ? stream->capturing : 0;
    return OK;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, unsigned long long *number,
                                   void *graph, void *dependencies, void *count)
{
    ENTER(1);
    *status = stream ? stream->capturing : 0;
    if (*status)
        *number = 7;
    return OK;
}
CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER(1);
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    return OK;
}
CUresult cuEventDestroy_v2(CUevent event) { ENTER(1); free(event); return OK; }
CUresult cuEventRecord(CUevent event, CUstream stream) { (void)stream; ENTER(1); event->recorded = 1; return OK; }
CUresult cuEventSynchronize(CUevent event) { (void)event; ENTER(1); return OK; }
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(1);
    if (start->flags || end->flags || !start->recorded || !end->recorded) return (CUresult)1;
    *milliseconds = 2.5f;
    return OK;
}

/* A tensor map holds its arguments: address, type, swizzle, promotion and rank, then sizes, strides and box. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    ENTER(0);
    unsigned row = box[0] * 2;
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || !rank || rank > 5) return (CUresult)1;
    if (((int)type != 6 && (int)type != 9) || (int)interleave || (int)fill || (int)promotion > 3) return (CUresult)1;
    if ((int)swizzle > 3 || row % 16 || (swizzle && row > 16u << (int)swizzle)) return (CUresult)1;
    uint64_t *word = map->opaque;
    *word++ = (uint64_t)(uintptr_t)address;
    *word++ = (uint64_t)type | (uint64_t)swizzle << 8 | (uint64_t)promotion << 16 | (uint64_t)rank << 24;
    for (unsigned i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > (uint64_t)1 << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return (CUresult)1;
        *word++ = sizes[i];
    }
    for (unsigned i = 0; i + 1 < rank; i++) {
        if (!strides[i] || strides[i] % 16 || strides[i] >= (uint64_t)1 << 40) return (CUresult)1;
        *word++ = strides[i];
    }
    for (unsigned i = 0; i < rank; i++) *word++ = box[i];
    return OK;
}

/* A module is "parameters N", maybe "tensors N", and anything else; text with BAD in it is refused with a log. */
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    char *info = NULL, *errors = NULL;
    unsigned errors_size = 0;
    ENTER(1);
    for (unsigned i = 0; i < count; i++) {
        if ((int)options[i] == 3) info = values[i];
        if ((int)options[i] == 5) errors = values[i];
        if ((int)options[i] == 6) errors_size = (unsigned)(uintptr_t)values[i];
    }
    if (strstr(image, "BAD")) {
        if (errors) snprintf(errors, errors_size, "ptxas application ptx input, line 7; fatal : Parsing error near 'BAD'");
        return (CUresult)218;
    }
    if (info && strstr(image, "WARN")) strcpy(info, "wgmma serialized");
    *module = calloc(1, sizeof **module);
    const char *at = strstr(image, "parameters ");
    (*module)->parameters = at ? atoi(at + 11) : 0;
    at = strstr(image, "tensors ");
    (*module)->tensors = at ? atoi(at + 8) : 0;
    return OK;
}
CUresult cuModuleUnload(CUmodule module) { ENTER(1); free(module); return OK; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER(1);
    if (strcmp(name, "missing") == 0) return (CUresult)500;
    *function = calloc(1, sizeof **function);
    (*function)->module = module;
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    (*function)->attributes[0] = strcmp(name, "fat") == 0 ? 128 : 1024;
    (*function)->attributes[1] = 16;
    (*function)->attributes[3] = 24;
    (*function)->attributes[4] = 168;
    (*function)->attributes[9] = -1;
    return OK;
}
CUresult cuFuncLoad(CUfunction function) { (void)function; ENTER(1); return OK; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    ENTER(1);
    *value = function->attributes[(int)attribute];
    return OK;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    ENTER(1);
    function->attributes[(int)attribute] = value;
    return OK;
}

static CUresult launched(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                         unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **parameters,
                         void **extra);

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra)
{
    ENTER(1);
    if (config->numAttrs > 1) return (CUresult)1;
    if (config->numAttrs && config->attrs[0].id != 6) return (CUresult)1;
    if (config->numAttrs && config->attrs[0].value.programmaticStreamSerializationAllowed != 1) return (CUresult)1;
    last.early = config->numAttrs;
    return launched(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                    config->blockDimZ, config->sharedMemBytes, config->hStream, parameters, extra);
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                        unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra)
{
    ENTER(1);
    last.early = 0;
    return launched(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

static CUresult launched(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                         unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **parameters,
                         void **extra)
{
    if (extra || !gx || !gy || !gz || shared > (unsigned)f->attributes[8] + 49152) return (CUresult)1;
    uint64_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    memcpy(last.grid, grid, sizeof grid);
    memcpy(last.block, block, sizeof block);
    last.shared = shared;
    last.stream = (uint64_t)(uintptr_t)stream;
    last.parameters = f->module->parameters;
    for (int i = 0; i < last.parameters; i++) memcpy(&last.values[i], parameters[i], 8);
    for (int i = 0; i < f->module->tensors; i++) {
        const void *map = parameters[last.parameters + i];
        if ((uintptr_t)map % 64) return (CUresult)1;
        memcpy(last.tensors[i], map, sizeof last.tensors[i]);
    }
    if (strcmp(f->name, "increment") == 0) { /* (int *data, int count, int by) */
        int *data = *(int **)parameters[0], count = *(int *)parameters[1], by_value = *(int *)parameters[2];
        for (int i = 0; i < count; i++) data[i] += by_value;
    }
    return OK;
}
