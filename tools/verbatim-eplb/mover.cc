#include "verbatim-eplb/mover.h"

#include <chrono>
#include <string>
#include <thread>

#include "memory/content.h"

namespace verbatim::eplb {

Mover::Mover(const Options& options, const Input& input, const Injection& injection, Transport& transport,
             Watchdog& watchdog)
    : options_(options),
      input_(input),
      injection_(injection),
      transport_(transport),
      watchdog_(watchdog),
      memory_(transport.memory()),
      contents_(options.seed),
      local_rows_(input.workload.local_rows()),
      offsets_(input.expert.offsets()),
      weights_(memory_, "weights", input.expert, local_rows_),
      new_rows_(memory_, "new rows", input.expert, local_rows_),
      random_(options.seed + static_cast<std::uint64_t>(options.job.rank)) {
  buffers_.weights = weights_.piece().bytes - weights_.guard_bytes();
  buffers_.new_rows = new_rows_.piece().bytes - new_rows_.guard_bytes();
  if (options.mode != Mode::kPacked) return;
  const auto emplace_buffer = [&](std::optional<PackedBuffer>& buffer, const char* name) {
    const std::size_t before = memory_.allocated();
    buffer.emplace(memory_, name, input.expert.bytes(), local_rows_);
    return memory_.allocated() - before - 2 * kGuardBytes;
  };
  buffers_.send = emplace_buffer(send_, "send buffer");
  buffers_.recv = emplace_buffer(recv_, "receive buffer");
}

std::vector<ranks::Piece> Mover::pieces() const {
  std::vector<ranks::Piece> pieces{weights_.piece(), new_rows_.piece()};
  if (send_) pieces.insert(pieces.end(), {send_->piece(), recv_->piece()});
  return pieces;
}

workload::Pattern Mover::content(const LayerWork& work, std::uint64_t iteration, int expert, std::size_t row,
                                 std::size_t tensor) const {
  if (expert == kEmptyRow) return contents_.poison(row, tensor);
  return contents_.expert(iteration, work.index, static_cast<std::size_t>(expert), tensor);
}

void Mover::prepare(const LayerWork& work, std::uint64_t iteration) {
  const std::size_t first = static_cast<std::size_t>(options_.job.rank) * local_rows_;
  const std::vector<Tensor>& tensors = input_.expert.tensors;
  for (std::size_t row = 0; row < local_rows_; ++row) {
    const Fill how = work.own.rows[row].how;
    const bool is_written = how == Fill::kReceive || how == Fill::kCopy;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      memory::fill(memory_, content(work, iteration, work.layer.before[first + row], row, t), weights_.at(t, row),
                   tensors[t].bytes);
      const workload::Pattern after =
          content(work, iteration, is_written ? work.layer.after[first + row] : kEmptyRow, row, t);
      if (is_written) {
        memory::poison(memory_, after, new_rows_.at(t, row), tensors[t].bytes);
      } else {
        memory::fill(memory_, after, new_rows_.at(t, row), tensors[t].bytes);
      }
    }
  }
  weights_.write_guards();
  new_rows_.write_guards();
  if (send_) send_->write_guards();
  if (recv_) recv_->write_guards();
}

std::vector<Part> Mover::parts_of_rows(const Rows& rows, PieceIndex piece, std::uint32_t row,
                                       std::uint32_t tensor) const {
  std::vector<Part> parts;
  for (std::uint32_t t = 0; t < input_.expert.tensors.size(); ++t) {
    if (tensor == kAllTensors || tensor == t) parts.push_back({rows.at(t, row), input_.expert.tensors[t].bytes, piece});
  }
  return parts;
}

// Receive number i goes into slot i of the receive buffer, or without that buffer directly into the new rows.
std::vector<Operation> Mover::address(const LayerWork& work) const {
  std::vector<std::uint32_t> slot_or_row(work.plan.transfers.size());  // by transfer that is received
  for (std::uint32_t i = 0; i < work.own.receives.size(); ++i) {
    const std::uint32_t transfer = work.own.receives[i];
    slot_or_row[transfer] = send_ ? i : work.plan.transfers[transfer].destination_row;
  }
  if (injects(Inject::kSwapReceives, work))
    std::swap(slot_or_row[work.own.receives[0]], slot_or_row[work.own.receives[1]]);
  std::vector<Operation> operations;
  for (const CallGroup& group : work.groups) {
    for (const Call& call : group.calls) {
      const Transfer& transfer = work.plan.transfers[call.transfer];
      Operation operation{call.sends,
                          static_cast<int>(call.sends ? transfer.destination : transfer.source),
                          transfer.expert,
                          call.tensor == kAllTensors ? 0 : call.tensor,
                          {}};
      std::uint32_t row = call.sends ? transfer.source_row : slot_or_row[call.transfer];
      if (call.sends && call.transfer == work.own.sends.front() && injects(Inject::kWrongSlot, work)) {
        row = other_row(input_.workload, work.layer, static_cast<std::size_t>(options_.job.rank), row);
      }
      if (send_) {
        const PackedBuffer& buffer = call.sends ? *send_ : *recv_;
        operation.parts.push_back({buffer.slot(row), input_.expert.bytes(), call.sends ? kSend : kRecv});
      } else {
        operation.parts = call.sends ? parts_of_rows(weights_, kWeights, row, call.tensor)
                                     : parts_of_rows(new_rows_, kNewRows, row, call.tensor);
      }
      if (call.sends && options_.mode == Mode::kPut) {
        for (std::size_t t = 0; t < offsets_.size(); ++t) {
          const std::byte* const target = new_rows_.at(t, transfer.destination_row);  // all ranks have the same layout
          operation.target_offsets.push_back(static_cast<std::size_t>(target - new_rows_.piece().data));
        }
      }
      operations.push_back(std::move(operation));
    }
  }
  return operations;
}

void Mover::run(const LayerWork& work) {
  const std::vector<Operation> operations = address(work);
  copy_local(work);
  if (send_) pack(work);
  memory_.finish();
  carry(work, operations);
  if (recv_) unpack(work);
  if (!send_ && injects(Inject::kFlipByte, work)) {
    const Transfer& transfer = work.plan.transfers[work.own.receives.front()];
    flip(new_rows_.at(0, transfer.destination_row));
  }
  move_from_buffer(work);
  memory_.finish();
  if (injects(Inject::kWriteGuard, work)) weights_.damage_guard(0, local_rows_ - 1);
}

// Packs each expert once, however many ranks need it.
void Mover::pack(const LayerWork& work) {
  for (const std::uint32_t index : work.own.packs) {
    const Transfer& transfer = work.plan.transfers[index];
    for (std::size_t t = 0; t < offsets_.size(); ++t) {
      memory_.copy(send_->slot(transfer.source_row) + offsets_[t], weights_.at(t, transfer.source_row),
                   input_.expert.tensors[t].bytes);
    }
    ++packs_;
  }
  if (injects(Inject::kFlipByte, work)) {
    flip(send_->slot(work.plan.transfers[work.own.sends.front()].source_row));
  }
}

void Mover::carry(const LayerWork& work, const std::vector<Operation>& operations) {
  watchdog_.begin("rank " + std::to_string(options_.job.rank) + ", layer " + std::to_string(work.layer.number),
                  operations.size(), [&operations](std::size_t i) { return operations[i].to_string(); });
  std::size_t first = 0;
  for (const CallGroup& group : work.groups) {
    if (options_.delay_ms > 0) {
      random_ = random_ * 6364136223846793005 + 1442695040888963407;
      const auto ms = static_cast<std::int64_t>((random_ >> 33) % (static_cast<std::uint64_t>(options_.delay_ms) + 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
      watchdog_.progress();
    }
    transport_.run_group({operations.data() + first, group.calls.size()}, first);
    first += group.calls.size();
  }
  transport_.finish();
  watchdog_.end();
}

void Mover::unpack(const LayerWork& work) {
  std::vector<std::size_t> offsets = offsets_;
  if (injects(Inject::kDtypeOrder, work)) {
    std::size_t at = 0;
    for (const std::size_t t : input_.expert.by_type()) {
      offsets[t] = at;
      at += input_.expert.tensors[t].bytes;
    }
  }
  for (std::uint32_t i = 0; i < work.own.receives.size(); ++i) {
    const std::uint32_t row = work.plan.transfers[work.own.receives[i]].destination_row;
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      memory_.copy(new_rows_.at(t, row), recv_->slot(i) + offsets[t], input_.expert.tensors[t].bytes);
    }
  }
}

void Mover::copy_local(const LayerWork& work) {
  for (std::size_t row = 0; row < local_rows_; ++row) {
    if (work.own.rows[row].how == Fill::kCopy) copy_row(new_rows_, row, weights_, work.own.rows[row].from);
  }
}

void Mover::move_from_buffer(const LayerWork& work) {
  for (std::size_t row = 0; row < local_rows_; ++row) {
    const Fill how = work.own.rows[row].how;
    if (how == Fill::kCopy || how == Fill::kReceive) copy_row(weights_, row, new_rows_, row);
  }
  bool drop = injects(Inject::kDropDuplicate, work);
  for (std::size_t row = 0; row < local_rows_; ++row) {
    if (work.own.rows[row].how != Fill::kDuplicate) continue;
    if (!drop) copy_row(weights_, row, new_rows_, work.own.rows[row].from);
    drop = false;
  }
}

void Mover::copy_row(const Rows& to, std::size_t to_row, const Rows& from, std::size_t from_row) {
  for (std::size_t t = 0; t < offsets_.size(); ++t) {
    memory_.copy(to.at(t, to_row), from.at(t, from_row), input_.expert.tensors[t].bytes);
  }
}

void Mover::flip(std::byte* at) {
  std::byte byte{};
  memory_.finish();
  memory_.download(&byte, at, 1);
  byte ^= std::byte{1};
  memory_.upload(at, &byte, 1);
}

// A row that is empty afterwards keeps its old content.
Damage Mover::check(const LayerWork& work, std::uint64_t iteration) {
  const std::size_t first = static_cast<std::size_t>(options_.job.rank) * local_rows_;
  const std::string location =
      "rank " + std::to_string(options_.job.rank) + ", layer " + std::to_string(work.layer.number) + ", ";
  Damage damage;
  for (std::size_t row = 0; row < local_rows_; ++row) {
    const Fill how = work.own.rows[row].how;
    const bool is_written = how == Fill::kReceive || how == Fill::kCopy;
    const int before = work.layer.before[first + row];
    const int after = work.layer.after[first + row];
    for (std::size_t t = 0; t < offsets_.size(); ++t) {
      const Tensor& tensor = input_.expert.tensors[t];
      const auto slot_or_row = [&](const Rows& rows, int expert) {
        return location + rows.name() + ", row " + std::to_string(row) + ", expert " + std::to_string(expert) +
               ", tensor " + tensor.name;
      };
      const int held = after == kEmptyRow ? before : after;
      damage.add(compare(memory_, weights_.at(t, row), tensor.bytes, content(work, iteration, held, row, t),
                         slot_or_row(weights_, held)));
      const int in_new_rows = is_written ? after : kEmptyRow;
      damage.add(compare(memory_, new_rows_.at(t, row), tensor.bytes, content(work, iteration, in_new_rows, row, t),
                         slot_or_row(new_rows_, in_new_rows)));
    }
  }
  Damage guards = weights_.check_guards();
  guards.add(new_rows_.check_guards());
  if (send_) guards.add(send_->check_guards());
  if (recv_) guards.add(recv_->check_guards());
  if (guards.bytes > 0) guards.first = location + guards.first;
  damage.add(guards);
  return damage;
}

}  // namespace verbatim::eplb
