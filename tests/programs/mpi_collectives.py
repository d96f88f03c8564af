"""One rank of Open MPI: collectives with checked contents, through libmpi by ctypes. The arguments are the numbers of
elements (four bytes) that each rank contributes."""

import ctypes
import sys

mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
WORLD = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
UINT32 = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_uint32_t"))
SUM = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_op_sum"))
P, I = ctypes.c_void_p, ctypes.c_int

# The argument types of each function before the communicator.
SIGNATURES = {
    "Bcast": [P, I, P, I],
    "Reduce": [P, P, I, P, P, I],
    "Allreduce": [P, P, I, P, P],
    "Gather": [P, I, P, P, I, P, I],
    "Scatter": [P, I, P, P, I, P, I],
    "Allgather": [P, I, P, P, I, P],
    "Alltoall": [P, I, P, P, I, P],
    "Gatherv": [P, I, P, P, P, P, P, I],
    "Scatterv": [P, P, P, P, P, I, P, I],
    "Allgatherv": [P, I, P, P, P, P, P],
    "Alltoallv": [P, P, P, P, P, P, P, P],
    "Reduce_scatter": [P, P, P, P, P],
    "Reduce_scatter_block": [P, P, I, P, P],
    "Scan": [P, P, I, P, P],
    "Exscan": [P, P, I, P, P],
    "Barrier": [],
}


def call(name, *arguments):
    function = getattr(mpi, "MPI_" + name)
    function.argtypes = [*SIGNATURES[name], P]
    assert function(*arguments, WORLD) == 0, name


def number(function):
    result = ctypes.c_int()
    function.argtypes = [P, P]
    assert function(WORLD, ctypes.addressof(result)) == 0
    return result.value


def value(rank, position):
    return (rank * 2654435761 + position * 40503) & 0xFFFFFFFF


def array(values):
    values = list(values)
    return (ctypes.c_uint32 * len(values))(*values)


def check(name, found, expected):
    assert list(found) == [item & 0xFFFFFFFF for item in expected], name


def collectives(rank, ranks, count):
    everyone = range(ranks)
    positions = range(count)
    own = array(value(rank, position) for position in positions)
    root = count % ranks
    is_root = rank == root

    buffer = array(own) if is_root else array([0] * count)
    call("Bcast", buffer, count, UINT32, root)
    check("Bcast", buffer, [value(root, position) for position in positions])

    sums = [sum(value(other, position) for other in everyone) for position in positions]
    result = array([0] * count)
    call("Reduce", own, result, count, UINT32, SUM, root)
    if is_root:
        check("Reduce", result, sums)
    result = array([0] * count)
    call("Allreduce", own, result, count, UINT32, SUM)
    check("Allreduce", result, sums)

    all_values = [value(other, position) for other in everyone for position in positions]
    gathered = array([0] * count * ranks)
    call("Gather", own, count, UINT32, gathered, count, UINT32, root)
    if is_root:
        check("Gather", gathered, all_values)
    gathered = array([0] * count * ranks)
    call("Allgather", own, count, UINT32, gathered, count, UINT32)
    check("Allgather", gathered, all_values)
    result = array([0] * count)
    call("Scatter", array(all_values), count, UINT32, result, count, UINT32, root)
    check("Scatter", result, own)

    sent = array(value(rank * ranks + other, position) for other in everyone for position in positions)
    call("Alltoall", sent, count, UINT32, gathered, count, UINT32)
    check("Alltoall", gathered, [value(other * ranks + rank, position) for other in everyone for position in positions])
    scattered = [sum(value(other * ranks + rank, position) for other in everyone) for position in positions]
    call("Reduce_scatter_block", sent, result, count, UINT32, SUM)
    check("Reduce_scatter_block", result, scattered)

    # Blocks in the reverse order of the ranks.
    counts = (I * ranks)(*[count] * ranks)
    places = (I * ranks)(*[(ranks - 1 - other) * count for other in everyone])
    reverse = [value(other, position) for other in reversed(everyone) for position in positions]
    call("Reduce_scatter", sent, result, counts, UINT32, SUM)
    check("Reduce_scatter", result, scattered)
    call("Gatherv", own, count, UINT32, gathered, counts, places, UINT32, root)
    if is_root:
        check("Gatherv", gathered, reverse)
    call("Allgatherv", own, count, UINT32, gathered, counts, places, UINT32)
    check("Allgatherv", gathered, reverse)
    call("Scatterv", array(reverse), counts, places, UINT32, result, count, UINT32, root)
    check("Scatterv", result, own)
    call("Alltoallv", sent, counts, places, UINT32, gathered, counts, places, UINT32)
    check(
        "Alltoallv",
        gathered,
        [value(other * ranks + ranks - 1 - rank, position) for other in reversed(everyone) for position in positions],
    )

    call("Scan", own, result, count, UINT32, SUM)
    check("Scan", result, [sum(value(other, position) for other in range(rank + 1)) for position in positions])
    call("Exscan", own, result, count, UINT32, SUM)
    if rank > 0:
        check("Exscan", result, [sum(value(other, position) for other in range(rank)) for position in positions])
    call("Barrier")


def main():
    assert mpi.MPI_Init(None, None) == 0
    rank, ranks = number(mpi.MPI_Comm_rank), number(mpi.MPI_Comm_size)
    for count in map(int, sys.argv[1:]):
        collectives(rank, ranks, count)
    assert mpi.MPI_Finalize() == 0
    print(f"rank {rank} of {ranks} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
