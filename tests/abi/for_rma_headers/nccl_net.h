// NCCL's RMA headers include the net header of NCCL's own build. Its types are in the header for plugins as well, which
// nccl_headers_test.cc has included before.
#pragma once
