// The size of one request of the block device under a file.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace offloadzero::aio {

// [Note: whole requests]
// The kernel splits a transfer into requests of at most max_segments pieces of memory (queue/max_segments)
// and max_sectors_kb. Memory of scattered 4 KiB pages has a segment per page: 1 MiB on a virtual disk with
// 254 segments becomes one request of 1016 KiB and one of 8 KiB, and the small one costs the drive as much as
// a large one. Cut to 1016 KiB, one such tensor of 1 GiB was read 2.5 % and written 4 to 8 % faster. Memory
// in huge pages has fewer segments and loses nothing.

// The largest size up to `block_size` that whole requests of `request_num_bytes` fill, if that is less than
// an eighth of a request away; else `block_size`.
size_t fit_requests(size_t block_size, size_t request_num_bytes);

// Bytes that one request takes in any memory, or 0: the file is on no block device, or on one that itself
// says where requests should be cut (RAID).
size_t request_num_bytes(dev_t device);

}  // namespace offloadzero::aio
