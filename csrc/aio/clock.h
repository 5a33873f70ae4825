#pragma once

#include <cstdint>
#include <ctime>

namespace offloadzero::aio {

// CLOCK_MONOTONIC, which is also Python's time.monotonic().
inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace offloadzero::aio
