// The layer between NCCL's RMA tables and src/rma: converts void* to objects and Error to ncclResult_t, and lets no
// exception out. Both versions share it; rma_tables.cc has what differs between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/types.h"
#include "rma/context_setup.h"

namespace verbatim::abi {

nccl::Result rma_init(int version, void** context, nccl::DebugLogger logger) noexcept;
nccl::Result rma_finalize(void* context) noexcept;
nccl::Result rma_devices(int* count) noexcept;
nccl::Result rma_listen(void* context, int device, void* handle, void** listen_comm) noexcept;
// `context` is not used: NCCL passes that of the net plugin, which may be another one.
nccl::Result rma_connect(void* context, void* handles[], int nranks, int rank, void* listen_comm,
                         void** coll_comm) noexcept;
nccl::Result rma_create_context(void* coll_comm, const rma::ContextSetupRequest& request, void** rma_context) noexcept;
nccl::Result rma_reg_mr(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t flags,
                        void** mhandle) noexcept;
nccl::Result rma_reg_mr_dmabuf(void* coll_comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                               std::uint64_t flags, void** mhandle) noexcept;
nccl::Result rma_dereg_mr(void* coll_comm, void* mhandle) noexcept;
nccl::Result rma_destroy_context(void* rma_context) noexcept;
nccl::Result rma_close_coll(void* coll_comm) noexcept;
nccl::Result rma_close_listen(void* listen_comm) noexcept;
nccl::Result rma_iput(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                      std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                      void** request) noexcept;
nccl::Result rma_iput_signal(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle,
                             std::size_t size, std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank,
                             std::uint64_t signal_offset, void* signal_mhandle, std::uint64_t signal_value,
                             std::uint32_t signal_operation, void** request) noexcept;
nccl::Result rma_iget(void* rma_context, int context, std::uint64_t remote_offset, void* remote_mhandle,
                      std::size_t size, std::uint64_t local_offset, void* local_mhandle, std::uint32_t rank,
                      void** request) noexcept;
nccl::Result rma_iflush(void* rma_context, int context, void* mhandle, std::uint32_t rank, void** request) noexcept;
nccl::Result rma_test(void* coll_comm, void* request, int* done) noexcept;
nccl::Result rma_progress(void* rma_context) noexcept;
nccl::Result rma_query_last_error(void* rma_context, bool* has_error) noexcept;

}  // namespace verbatim::abi
