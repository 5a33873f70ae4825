#include "device_limits.h"

#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace offloadzero::aio {
namespace {

// Reads a number in the device's queue directory; 0 when it is not there. A partition has its disk's.
unsigned long long queue_attribute(dev_t device, const char* name) {
    const std::string folder =
        "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
    for (const char* queue : {"/queue/", "/../queue/"}) {
        unsigned long long value;
        if (std::ifstream(folder + queue + name) >> value) return value;
    }
    return 0;
}

}  // namespace

size_t fit_requests(size_t block_size, size_t request_num_bytes) {
    if (request_num_bytes == 0 || block_size < request_num_bytes) return block_size;
    const size_t rest = block_size % request_num_bytes;
    return rest < request_num_bytes / 8 ? block_size - rest : block_size;
}

size_t request_num_bytes(dev_t device) {
    if (queue_attribute(device, "optimal_io_size") != 0 || queue_attribute(device, "chunk_sectors") != 0)
        return 0;
    const auto page = static_cast<unsigned long long>(sysconf(_SC_PAGESIZE));
    const unsigned long long by_segments = queue_attribute(device, "max_segments") * page;
    const unsigned long long by_sectors = queue_attribute(device, "max_sectors_kb") * 1024;
    const unsigned long long limit = std::min(by_segments, by_sectors);
    return static_cast<size_t>(limit - limit % page);
}

}  // namespace offloadzero::aio
