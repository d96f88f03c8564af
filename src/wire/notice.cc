#include "wire/notice.h"

#include <algorithm>
#include <cstring>

#include "wire/codec.h"

namespace verbatim::wire {

Notice::Notice(MessageType type, std::size_t body_bytes) : size_(kHeaderBytes + body_bytes), type_(type) {
  put_header(std::span(bytes_).first<kHeaderBytes>(), type, body_bytes);
}

namespace {

// The part of `text` that fits: it ends with a statement where most of the text stays, else with a word.
std::string_view cut_failure_text(std::string_view text) {
  if (text.size() <= kMaxFailureText) return text;
  // One more byte: an end of exactly this length fits.
  const std::string_view fits = text.substr(0, kMaxFailureText + 1);
  std::size_t end = 0;
  for (const std::string_view separator : {". ", ": ", "; "}) {
    const std::size_t at = fits.rfind(separator);
    if (at != std::string_view::npos) end = std::max(end, at);
  }
  if (end < kMaxFailureText / 2) end = fits.rfind(' ');
  return text.substr(0, std::min(end, kMaxFailureText));
}

}  // namespace

Notice Notice::failed(ErrorKind kind, std::string_view text) {
  text = cut_failure_text(text);
  const auto number = static_cast<std::uint32_t>(kind);
  Notice notice(MessageType::kFailed, sizeof number + text.size());
  std::memcpy(notice.bytes_.data() + kHeaderBytes, &number, sizeof number);
  std::memcpy(notice.bytes_.data() + kHeaderBytes + sizeof number, text.data(), text.size());
  return notice;
}

Notice Notice::resume(const Resume& resume, const Key& session) {
  Notice notice = with_body(MessageType::kResume, resume);
  notice.size_ += kMacBytes;
  put_mac(std::span(notice.bytes_).first(notice.size_), session);
  return notice;
}

Notice Notice::lane_fenced(const LaneReport& report) {
  static_assert(sizeof report <= kMaxNoticeBody);
  const std::size_t bytes = offsetof(LaneReport, arrived) + report.qps * sizeof report.arrived[0];
  Notice notice(MessageType::kLaneFenced, bytes);
  std::memcpy(notice.bytes_.data() + kHeaderBytes, &report, bytes);
  return notice;
}

Notice Notice::lane_address(MessageType type, const LaneAddress& address) {
  static_assert(sizeof address <= kMaxNoticeBody);
  const std::size_t bytes = offsetof(LaneAddress, qp_numbers) + address.qps * sizeof address.qp_numbers[0];
  Notice notice(type, bytes);
  std::memcpy(notice.bytes_.data() + kHeaderBytes, &address, bytes);
  return notice;
}

std::optional<FailureNotice> decode_failure(std::span<std::uint8_t> body) {
  Reader reader(body);
  const auto number = reader.get<std::uint32_t>();
  if (!reader.complete() || number > static_cast<std::uint32_t>(ErrorKind::kRemote)) return std::nullopt;
  const std::span<std::uint8_t> text = body.subspan(sizeof number);
  for (std::uint8_t& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return FailureNotice{static_cast<ErrorKind>(number),
                       std::string_view(reinterpret_cast<const char*>(text.data()), text.size())};
}

std::optional<ConnectionStatus> decode_status_reply(std::span<const std::uint8_t> body) {
  const auto reply = decode<ConnectionStatus>(body);
  return reply && reply->sends <= 1 ? reply : std::nullopt;
}

namespace {

// A body that ends with `qps` numbers.
template <typename Body>
std::optional<Body> decode_numbers(std::span<const std::uint8_t> body, std::size_t fixed) {
  Body decoded;
  if (body.size() < fixed || body.size() > sizeof decoded) return std::nullopt;
  std::memcpy(&decoded, body.data(), body.size());
  if (decoded.qps > kMaxLaneQps || body.size() != fixed + decoded.qps * sizeof(std::uint32_t)) return std::nullopt;
  return decoded;
}

}  // namespace

std::optional<LaneReport> decode_lane_fenced(std::span<const std::uint8_t> body) {
  const auto report = decode_numbers<LaneReport>(body, offsetof(LaneReport, arrived));
  if (!report || report->all_arrived > 1 || report->all_drained > 1) return std::nullopt;
  return report;
}

std::optional<LaneAddress> decode_lane_address(std::span<const std::uint8_t> body) {
  return decode_numbers<LaneAddress>(body, offsetof(LaneAddress, qp_numbers));
}

std::optional<Resume> decode_resume(std::span<const std::uint8_t> body) {
  const auto resume = decode<Resume>(body);
  return resume && resume->end.connecting <= 1 ? resume : std::nullopt;
}

}  // namespace verbatim::wire
