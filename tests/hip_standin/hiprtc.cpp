// A stand-in for libhiprtc: compiles kernels with g++ for the host. Its code objects are shared libraries.
//
// Built with -DFOLDER="...", where device.h and its precompiled form are.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#ifdef WITH_HIP_HEADERS
#include <hip/hiprtc.h>
#else
typedef int hiprtcResult;
typedef struct _hiprtcProgram* hiprtcProgram;
#endif

struct _hiprtcProgram {
    std::string source, log, code;
};

namespace {

int compiled;
int fail_code;
std::string options_seen;
const hiprtcResult ok = (hiprtcResult)0, invalid = (hiprtcResult)3, refused = (hiprtcResult)6;

std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

// The name of the kernel: what comes before the parameters of the only function that has the macro.
std::string entry(const std::string& source) {
    const size_t macro = source.find("\nAULE_KERNEL("), start = source.find(" void ", macro) + 6;
    return macro == std::string::npos ? "" : source.substr(start, source.find('(', start) - start);
}

// A function that runs a grid of workgroups one after another.
std::string launcher(const std::string& name) {
    return "\nextern \"C\" void standin_launch_" + name + R"((unsigned x, unsigned y, unsigned z, unsigned threads, void** table)
{
    static void** arguments;
    arguments = table, shim::kSimd = AULE_WAVE;
    aule::count[0] = x, aule::count[1] = y, aule::count[2] = z;
    for (unsigned k = 0; k < z; k++)
        for (unsigned j = 0; j < y; j++)
            for (unsigned i = 0; i < x; i++) {
                aule::position[0] = i, aule::position[1] = j, aule::position[2] = k;
                shim::run(threads, [](int) { standin::call()" + name + R"(, arguments); });
            }
}
)";
}

}  // namespace

extern "C" {

int standin_compiled() { return compiled; }
const char* standin_options() { return options_seen.c_str(); }
void standin_fail_compiler(int code) { fail_code = code; }

const char* hiprtcGetErrorString(hiprtcResult result) { return result == refused ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR"; }
hiprtcResult hiprtcVersion(int* major, int* minor) { *major = 6, *minor = 3; return ok; }

hiprtcResult hiprtcCreateProgram(
    hiprtcProgram* program, const char* source, const char*, int, const char**, const char**)
{
    if (fail_code) {
        const int code = fail_code;
        fail_code = 0;
        return (hiprtcResult)code;
    }
    *program = new _hiprtcProgram{source, "", ""};
    return ok;
}
hiprtcResult hiprtcDestroyProgram(hiprtcProgram* program) { delete *program; *program = nullptr; return ok; }

hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char** options)
{
    options_seen.clear();
    for (int i = 0; i < count; i++) options_seen += std::string(options[i]) + " ";
    if (options_seen.find("--offload-arch=gfx") == std::string::npos) return invalid;
    char folder[] = FOLDER "/kernel-XXXXXX";
    if (!mkdtemp(folder)) return invalid;
    const std::string stem = std::string(folder) + "/kernel", name = entry(program->source);
    std::ofstream(stem + ".cpp") << program->source << (name.empty() ? "" : launcher(name));
    const std::string command = "g++ " FLAGS " -DAULE_STAND_IN -shared -include " FOLDER "/device.h -o " + stem + ".so "
        + stem + ".cpp 2>" + stem + ".log";
    const int status = std::system(command.c_str());
    program->log = content(stem + ".log");
    if (status == 0) program->code = content(stem + ".so");
    for (const char* end : {".cpp", ".so", ".log"}) unlink((stem + end).c_str());
    rmdir(folder);
    compiled++;
    return status == 0 ? ok : refused;
}
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t* size) { *size = program->log.size() + 1; return ok; }
hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char* log)
{
    std::memcpy(log, program->log.c_str(), program->log.size() + 1);
    return ok;
}
hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t* size) { *size = program->code.size(); return ok; }
hiprtcResult hiprtcGetCode(hiprtcProgram program, char* code)
{
    std::memcpy(code, program->code.data(), program->code.size());
    return ok;
}

}
