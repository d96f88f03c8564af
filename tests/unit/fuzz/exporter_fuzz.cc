// Fuzzes HTTP requests to verbatim-exporter: a request of a correct scraper, of which the input changes bytes, that it
// repeats, truncates and sends in pieces. Whatever comes, the next correct scrape gets the metrics.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "fuzz.h"
#include "verbatim-exporter/metrics.h"
#include "verbatim-exporter/server.h"

namespace {

using namespace verbatim;
using fuzz::require;

constexpr int kPatienceMs = 20'000;

// As in tools/verbatim-exporter/main.cc.
class Exporter {
 public:
  Exporter() {
    std::thread([this] { server_.run(); }).detach();
  }
  UniqueFd connect() const {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(server_.port());
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const linger none{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    require(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
            "the exporter accepts a connection");
    return socket;
  }

 private:
  exporter::Metrics metrics_{live::Sampler::Options{.directories = {"/none"}}, 4};
  exporter::Server server_{"127.0.0.1:0", [this] { return metrics_.collect(); }};
};

std::string text(fuzz::Input& input) {
  const std::span<const std::uint8_t> bytes = input.take(input.get<std::uint8_t>());
  return {bytes.begin(), bytes.end()};
}

std::string make_request(fuzz::Input& input) {
  const auto flags = input.get<std::uint8_t>();
  std::string method = "GET";
  std::string target = "/metrics";
  std::string version = "HTTP/1.1";
  std::string fields = "Host: localhost\r\nAccept: text/plain\r\n";
  if ((flags & 1) != 0) method = text(input);
  if ((flags & 2) != 0) target = text(input);
  if ((flags & 4) != 0) version = text(input);
  if ((flags & 8) != 0) fields += text(input);
  if ((flags & 16) != 0) {
    const std::string name = text(input);
    for (unsigned i = input.get<std::uint16_t>() % 2000; i > 0; --i) fields += name;
  }
  constexpr const char* kFields[] = {"Content-Length: -1\r\n",         "Content-Length: 99999999999999999999\r\n",
                                     "Transfer-Encoding: chunked\r\n", "Accept-Encoding: gzip\r\n",
                                     "Expect: 100-continue\r\n",       "Connection: keep-alive\r\n",
                                     "Range: bytes=5-1\r\n",           "Authorization: Basic ====\r\n"};
  if ((flags & 32) != 0) fields += kFields[input.get<std::uint8_t>() % std::size(kFields)];
  std::string request = method + " " + target + " " + version + "\r\n" + fields + "\r\n" + text(input);
  if ((flags & 64) != 0) request[input.get<std::uint16_t>() % request.size()] = static_cast<char>(input.get<char>());
  if ((flags & 128) != 0) request.resize(input.get<std::uint16_t>() % (request.size() + 1));
  return request;
}

// Until the exporter closes the connection, or has sent nothing for so long.
std::string read_answer(const UniqueFd& socket, int patience_ms) {
  std::string answer;
  char some[4096];
  pollfd readable{socket.get(), POLLIN, 0};
  while (::poll(&readable, 1, patience_ms) > 0) {
    const ssize_t count = ::recv(socket.get(), some, sizeof some, 0);
    if (count <= 0) break;
    answer.append(some, static_cast<std::size_t>(count));
  }
  return answer;
}

void send(const UniqueFd& socket, const std::string& request, std::size_t piece) {
  for (std::size_t at = 0; at < request.size(); at += piece) {
    const std::size_t count = std::min(piece, request.size() - at);
    if (::send(socket.get(), request.data() + at, count, MSG_NOSIGNAL) < 0) return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Exporter& exporter = *new Exporter;  // for its threads, until the process ends
  fuzz::Input input({data, size});
  const auto how = input.get<std::uint8_t>();
  {
    const UniqueFd socket = exporter.connect();
    const std::string request = make_request(input);
    send(socket, request, (how & 1) != 0 ? 1 + how / 2U : request.size() + 1);
    if ((how & 2) != 0) ::shutdown(socket.get(), SHUT_WR);
    const std::string answer = read_answer(socket, (how & 2) != 0 ? kPatienceMs : 0);
    require(answer.empty() || answer.starts_with("HTTP/"), "an answer is one of HTTP");
  }
  const UniqueFd scraper = exporter.connect();
  send(scraper, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 4096);
  const std::string answer = read_answer(scraper, kPatienceMs);
  require(answer.starts_with("HTTP/1.1 200 ") && answer.find("\nverbatim_up 1") != std::string::npos,
          "a correct scrape gets the metrics");
  return 0;
}
