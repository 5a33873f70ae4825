// The part of the kernel's io_uring interface that is used here, by number and layout. Not
// <linux/io_uring.h>: a package built against old headers must still use what a newer kernel has.
#pragma once

#include <cstdint>

namespace offloadzero::aio::uring {

// These numbers are the same on every architecture but alpha.
constexpr long SYS_SETUP = 425, SYS_ENTER = 426, SYS_REGISTER = 427;

enum SetupFlag : uint32_t {
    SETUP_DISABLED = 1u << 6,        // 5.10
    SETUP_COOP_TASKRUN = 1u << 8,    // 5.19
    SETUP_SINGLE_ISSUER = 1u << 12,  // 6.0
    SETUP_DEFER_TASKRUN = 1u << 13,  // 6.1
};

enum Feature : uint32_t {
    FEATURE_SINGLE_MMAP = 1u << 0,
    FEATURE_EXT_ARG = 1u << 8,
};

enum EnterFlag : uint32_t { ENTER_GET_EVENTS = 1u << 0, ENTER_EXT_ARG = 1u << 3 };

enum Opcode : uint8_t { OP_READ_FIXED = 4, OP_WRITE_FIXED = 5, OP_READ = 22, OP_WRITE = 23 };

enum SqeFlag : uint8_t { SQE_FIXED_FILE = 1u << 0 };

enum RegisterOp : unsigned {
    REGISTER_FILES = 2,
    REGISTER_FILES_UPDATE = 6,
    REGISTER_PROBE = 8,
    REGISTER_ENABLE_RINGS = 12,
    REGISTER_BUFFERS2 = 15,
    REGISTER_BUFFERS_UPDATE = 16,
};

constexpr uint32_t REGISTER_SPARSE = 1u << 0;

constexpr uint64_t OFFSET_RINGS = 0, OFFSET_SQES = 0x10000000;

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_addr;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t user_addr;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle_ms, features, wq_fd, reserved[3];
    SqOffsets sq_off;
    CqOffsets cq_off;
};

struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;  // a slot with SQE_FIXED_FILE
    uint64_t offset;
    uint64_t address;
    uint32_t num_bytes;
    uint32_t rw_flags;
    uint64_t user_data;
    uint16_t buffer_slot;
    uint16_t personality;
    int32_t splice_fd;
    uint64_t reserved[2];
};

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

struct GetEventsArg {
    uint64_t signal_mask;
    uint32_t signal_mask_num_bytes;
    uint32_t min_wait_us;
    uint64_t timeout;  // address of a timespec of two 64-bit words
};

struct KernelTimespec {
    int64_t seconds;
    long long nanoseconds;
};

struct FilesUpdate {
    uint32_t offset;
    uint32_t reserved;
    uint64_t fds;
};

struct ResourceRegister {
    uint32_t num_slots;
    uint32_t flags;
    uint64_t reserved;
    uint64_t data;
    uint64_t tags;
};

struct ResourceUpdate {
    uint32_t offset;
    uint32_t reserved1;
    uint64_t data;
    uint64_t tags;
    uint32_t num_slots;
    uint32_t reserved2;
};

struct ProbeOp {
    uint8_t opcode;
    uint8_t reserved1;
    uint16_t flags;  // bit 0: supported
    uint32_t reserved2;
};

struct Probe {
    uint8_t last_op;
    uint8_t num_ops;
    uint16_t reserved1;
    uint32_t reserved2[3];
    ProbeOp ops[64];
};

static_assert(sizeof(Params) == 120 && sizeof(Sqe) == 64 && sizeof(Cqe) == 16);
static_assert(sizeof(GetEventsArg) == 24 && sizeof(ResourceRegister) == 32 && sizeof(ResourceUpdate) == 32);

}  // namespace offloadzero::aio::uring
