// Compiles a region of one translation unit for an instruction set, and nothing outside it.
//
// The region must come after every standard include: an inline function of the standard library compiled
// inside it could be the copy the linker keeps for the whole module, and then run on CPUs that lack the
// instructions.
#pragma once

#define OFFLOADZERO_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define OFFLOADZERO_TARGET_BEGIN(features) \
    OFFLOADZERO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OFFLOADZERO_TARGET_END _Pragma("clang attribute pop")
#else
#define OFFLOADZERO_TARGET_BEGIN(features) \
    _Pragma("GCC push_options") OFFLOADZERO_PRAGMA(GCC target(features))
#define OFFLOADZERO_TARGET_END _Pragma("GCC pop_options")
#endif

#define OFFLOADZERO_INLINE static inline __attribute__((always_inline))
