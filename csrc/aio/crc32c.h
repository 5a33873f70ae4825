// CRC-32C (Castagnoli, as in iSCSI, RFC 3720) of the blocks of a buffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadzero::aio {

// The checksums of consecutive blocks of `block_size` bytes; the last block may be shorter. Writes one for
// each block to `sums`. `with_tables`: as a machine without the instruction does.
void crc32c_blocks(const char* data, size_t num_bytes, size_t block_size, uint32_t* sums, bool with_tables);

// The index of the first block whose checksum is not the one expected, or -1.
int64_t crc32c_find_mismatch(const char* data, size_t num_bytes, size_t block_size, const uint32_t* expected);

// "sse4.2" or "tables": what this machine computes them with.
const char* crc32c_implementation();

}  // namespace offloadzero::aio
