// The threads of a workgroup as fibers on one operating-system thread: what the stand-ins that run GPU kernels share.
//
// A barrier, or an operation of a subgroup, hands over to the next fiber until all have arrived, so nothing ever runs at
// the same time and atomics are plain.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

namespace shim {

// Lanes of a subgroup. A variable is static, since all kernels of a process share inline ones.
#ifdef SHIM_ANY_SIMD
static int kSimd = 32;
#else
constexpr int kSimd = 32;
#endif
constexpr size_t kStack = 256 * 1024;

struct Rendezvous {
    int members = 0, arrived = 0;
    long generation = 0;
};

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    std::vector<char> stack;
    bool started = false, done = false;
    long simd_operations = 0;
};

struct Group {
    std::vector<Fiber> fibers;
    std::vector<Rendezvous> simd;
    // What each lane brings to an operation of its simdgroup. Two sets: a lane may reach the next operation before
    // another has read this one, but never the one after.
    std::vector<uint64_t> exchange[2];
    std::vector<float> matrices[2];
    Rendezvous all;
    int current = 0, alive = 0;
    long idle = 0;
    jmp_buf home;
    void (*body)(int) = nullptr;
};

inline Group group;

inline void next() {
    const int n = (int)group.fibers.size();
    if (group.alive == 0) longjmp(group.home, 1);
    do group.current = (group.current + 1) % n; while (group.fibers[group.current].done);
    Fiber& fiber = group.fibers[group.current];
    if (fiber.started) longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

inline void yield() {
    if (++group.idle > 4L * (long)group.fibers.size() + 64) {
        std::fprintf(stderr, "shim: a barrier or an operation of a subgroup that not every thread reaches\n");
        std::abort();
    }
    if (_setjmp(group.fibers[group.current].place) == 0) next();
}

inline void meet(Rendezvous& r) {
    const long generation = r.generation;
    group.idle = 0;
    if (++r.arrived == r.members) {
        r.arrived = 0;
        r.generation++;
        return;
    }
    while (r.generation == generation) yield();
}

inline void trampoline() {
    group.body(group.current);
    group.fibers[group.current].done = true;
    group.alive--;
    group.idle = 0;
    next();
}

inline void run(int lanes, void (*body)(int)) {
    group.body = body;
    group.fibers.resize(lanes);
    const int subgroups = (lanes + kSimd - 1) / kSimd;
    group.simd.assign(subgroups, Rendezvous());
    for (int i = 0; i < subgroups; i++) group.simd[i].members = lanes - i * kSimd < kSimd ? lanes - i * kSimd : kSimd;
    for (int i = 0; i < 2; i++) {
        group.exchange[i].assign(lanes, 0);
        group.matrices[i].assign(subgroups * 128, 0);
    }
    group.all = Rendezvous();
    group.all.members = lanes;
    group.alive = lanes;
    group.current = lanes - 1;
    group.idle = 0;
    for (Fiber& fiber : group.fibers) {
        if (fiber.stack.empty()) fiber.stack.resize(kStack);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, trampoline, 0);
        fiber.started = fiber.done = false;
        fiber.simd_operations = 0;
    }
    if (_setjmp(group.home) == 0) next();
}

// Everything the lanes of this thread's simdgroup brought, by lane.
template <class T> inline const uint64_t* gather(T mine) {
    static_assert(sizeof(T) <= 8, "a word");
    std::vector<uint64_t>& slots = group.exchange[group.fibers[group.current].simd_operations++ & 1];
    uint64_t bits = 0;
    std::memcpy(&bits, &mine, sizeof(T));
    slots[group.current] = bits;
    const int base = group.current / kSimd * kSimd;
    meet(group.simd[group.current / kSimd]);
    return slots.data() + base;
}

inline int simd_members() { return group.simd[group.current / kSimd].members; }

template <class T> inline T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace shim
