// The factory functions of the operations. ring.cc: all_reduce, all_gather, reduce_scatter, broadcast, reduce;
// point_to_point.cc: alltoall, alltoallv, gather, scatter, hypercube, sendrecv; pair.cc: stream, pingpong, grouped.
#pragma once

#include <memory>

#include "verbatim-perf/operation.h"

namespace verbatim::perf {

std::unique_ptr<Operation> make_all_reduce(const Shape& shape);
std::unique_ptr<Operation> make_all_gather(const Shape& shape);
std::unique_ptr<Operation> make_reduce_scatter(const Shape& shape);
std::unique_ptr<Operation> make_broadcast(const Shape& shape);
std::unique_ptr<Operation> make_reduce(const Shape& shape);
std::unique_ptr<Operation> make_all_to_all(const Shape& shape);
std::unique_ptr<Operation> make_all_to_all_v(const Shape& shape);
std::unique_ptr<Operation> make_gather(const Shape& shape);
std::unique_ptr<Operation> make_scatter(const Shape& shape);
std::unique_ptr<Operation> make_hypercube(const Shape& shape);
std::unique_ptr<Operation> make_sendrecv(const Shape& shape);
std::unique_ptr<Operation> make_stream(const Shape& shape);
std::unique_ptr<Operation> make_pingpong(const Shape& shape);
std::unique_ptr<Operation> make_grouped(const Shape& shape);

}  // namespace verbatim::perf
