#include "verbatim-exporter/server.h"

#include <event2/buffer.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <exception>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include "base/socket.h"
#include "cli/exit_status.h"

namespace verbatim::exporter {
namespace {

// The event loop counts the time of clients in ticks of its own, because libevent's time-outs go on while a scrape is
// computed: afterwards they would cut off clients whose bytes have come meanwhile. A tick comes after what has been
// received was read, and one at most however long a scrape has taken. evhttp's own time-outs have two more faults: the
// one for reading also limits how long an answer is written, and bytes that come one by one start it again and again.
constexpr timeval kTick{.tv_sec = 0, .tv_usec = 250'000};
constexpr timeval kAtOnce{};
constexpr int kMaxRequestTicks = 8;  // 2 s, for a whole request
constexpr int kMaxAnswerTicks = 40;  // 10 s, as Prometheus waits for an answer unless it is configured otherwise
// evhttp's time-out: for a connection that add_client() has no memory for, which has no ticks.
constexpr int kUncountedSeconds = 60;

// So clients cannot have more than one scrape made in this time. In the time of an answer there are few different
// texts: this limits the memory.
constexpr std::chrono::seconds kTextAge{1};

// The program needs descriptors for the state sockets too, and often has 1,024.
constexpr std::size_t kMaxClients = 256;
constexpr ev_ssize_t kMaxHeaderBytes = 8192;
constexpr ev_ssize_t kMaxBodyBytes = 4096;
// What is read before evhttp has used it: larger than both, or it would not see that they are exceeded.
constexpr std::size_t kMaxReadBytes = 16384;
// What the system keeps for a client that does not read; Linux makes it twice as much. Otherwise it is several MiB, and
// the program sees nothing of a client that reads them.
constexpr int kSendBytes = 1 << 18;
// At once. libevent writes 16 KiB otherwise, with a pass of the event loop for each.
constexpr std::size_t kMaxWriteBytes = 1 << 20;

constexpr const char* kRootPage =
    "<!DOCTYPE html>\n<title>verbatim-exporter</title>\n"
    "<p><a href=\"/metrics\">/metrics</a>: metrics of the processes of this host that use Verbatim, for Prometheus\n";

std::uint16_t port_of(const sockaddr_storage& address) {
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);  // at the same place with IPv6
}

sockaddr_storage parse_address(const std::string& text) {
  const std::size_t colon = std::min(text.rfind(':'), text.size());
  const std::string host = text.substr(0, colon);
  const char* const digits = text.data() + std::min(colon + 1, text.size());
  const char* const end = text.data() + text.size();
  std::uint16_t port = 0;
  const auto [after, error] = std::from_chars(digits, end, port);
  sockaddr_storage address{};
  int size = sizeof address;
  if (error != std::errc{} || after != end ||
      evutil_parse_sockaddr_port(host.c_str(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      port_of(address) != 0) {  // a second port
    throw cli::Failure("'" + text + "' is no address and port. Next: write them as in 127.0.0.1:9477 or [::1]:9477",
                       cli::ExitStatus::kUsage);
  }
  set_port(address, htons(port));
  return address;
}

template <typename Object>
Object* made(Object* object) {
  if (object == nullptr) throw std::bad_alloc();
  return object;
}

void add_header(evhttp_request* request, const char* name, const std::string& value) {
  evhttp_add_header(evhttp_request_get_output_headers(request), name, value.c_str());
}

// The text is written from where it is. evhttp 2.1 would send a body for HEAD too.
void send(evhttp_request* request, int status, const char* type, std::shared_ptr<const std::string> text) {
  evhttp_remove_header(evhttp_request_get_input_headers(request), "Connection");  // evhttp would add "keep-alive"
  add_header(request, "Connection", "close");
  add_header(request, "Content-Type", type);
  add_header(request, "Content-Length", std::to_string(text->size()));
  if (evhttp_request_get_command(request) != EVHTTP_REQ_HEAD) {
    using Share = std::shared_ptr<const std::string>;
    auto share = std::make_unique<Share>(std::move(text));
    const auto drop = [](const void*, std::size_t, void* dropped) { delete static_cast<Share*>(dropped); };
    if (evbuffer_add_reference(evhttp_request_get_output_buffer(request), (*share)->data(), (*share)->size(), drop,
                               share.get()) != 0) {
      throw std::bad_alloc();
    }
    static_cast<void>(share.release());
  }
  evhttp_send_reply(request, status, nullptr, nullptr);
}

void send(evhttp_request* request, int status, const char* type, const char* text) {
  send(request, status, type, std::make_shared<const std::string>(text));
}

std::size_t bytes_left(bufferevent* stream) {
  return evbuffer_get_length(bufferevent_get_output(stream));
}

// Whether the event loop has yet to read, or to write: a pass handles some clients only if many are ready.
bool is_ready(bufferevent* stream, bool has_request) {
  pollfd state{bufferevent_getfd(stream), static_cast<short>(has_request ? POLLOUT : POLLIN), 0};
  return (!has_request || bytes_left(stream) != 0) && ::poll(&state, 1, 0) > 0;
}

}  // namespace

Server::Server(const std::string& address, std::function<std::string()> collect)
    : collect_(std::move(collect)), base_(made(event_base_new())), http_(made(evhttp_new(base_.get()))) {
  Result<UniqueFd> socket = tcp_listen(parse_address(address));
  if (!socket) {
    throw cli::Failure("listening at " + address + ": " + to_string(socket.error()) +
                       ". Next: --listen with an address of this host, and a port that is free or 0");
  }
  ::setsockopt(socket->get(), SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof kSendBytes);  // and of those it accepts
  listener_ = evhttp_bound_socket_get_listener(made(evhttp_accept_socket_with_handle(http_.get(), socket->get())));
  static_cast<void>(socket->release());
  evhttp_set_max_headers_size(http_.get(), kMaxHeaderBytes);
  evhttp_set_max_body_size(http_.get(), kMaxBodyBytes);
  // answer() refuses the others.
  evhttp_set_allowed_methods(http_.get(), EVHTTP_REQ_GET | EVHTTP_REQ_HEAD | EVHTTP_REQ_POST | EVHTTP_REQ_PUT |
                                              EVHTTP_REQ_DELETE | EVHTTP_REQ_OPTIONS | EVHTTP_REQ_TRACE |
                                              EVHTTP_REQ_CONNECT | EVHTTP_REQ_PATCH);
  evhttp_set_timeout(http_.get(), kUncountedSeconds);
  evhttp_set_bevcb(
      http_.get(), [](event_base*, void* self) { return static_cast<Server*>(self)->add_client(); }, this);
  evhttp_set_gencb(
      http_.get(), [](evhttp_request* request, void* self) { static_cast<Server*>(self)->answer(request); }, this);
  // Without a free descriptor, the connection that waits would be reported again and again. tick() accepts again.
  evconnlistener_set_error_cb(listener_, [](evconnlistener* listener, void*) { evconnlistener_disable(listener); });
  const auto on_tick = [](int, short, void* self) { static_cast<Server*>(self)->tick(); };
  events_.emplace_back(made(event_new(base_.get(), -1, EV_PERSIST, on_tick, this)));
  event_add(events_.back().get(), &kTick);
  const auto on_full = [](int, short, void* self) { static_cast<Server*>(self)->accept_again(); };
  full_.reset(made(event_new(base_.get(), -1, 0, on_full, this)));
}

std::uint16_t Server::port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(evconnlistener_get_fd(listener_), reinterpret_cast<sockaddr*>(&address), &size);
  return port_of(address);
}

void Server::end_at(int signal) {
  const auto end = [](int, short, void* base) { event_base_loopbreak(static_cast<event_base*>(base)); };
  events_.emplace_back(made(evsignal_new(base_.get(), signal, end, base_.get())));
  event_add(events_.back().get(), nullptr);
}

void Server::run() {
  std::signal(SIGPIPE, SIG_IGN);  // a client that closes its end while an answer is written
  if (event_base_dispatch(base_.get()) < 0) throw cli::Failure("waiting for clients has failed");
}

// nullptr where there is no memory: evhttp makes a stream of its own then, or closes the connection.
bufferevent* Server::add_client() noexcept {
  try {
    forget_closed();
    Clients added(1);
    bufferevent* const stream = made(bufferevent_socket_new(base_.get(), -1, BEV_OPT_CLOSE_ON_FREE));
    bufferevent_setwatermark(stream, EV_READ, 0, kMaxReadBytes);
    bufferevent_set_max_single_write(stream, kMaxWriteBytes);
    bufferevent_incref(stream);
    added.front().stream.reset(stream);
    clients_.splice(clients_.end(), added);
    if (clients_.size() >= kMaxClients) {
      evconnlistener_disable(listener_);
      event_add(full_.get(), &kAtOnce);  // after what the connected ones have sent meanwhile was read
    }
    return stream;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// The place of one client is enough: there is one more pass of the event loop before the next one loses its place.
void Server::accept_again() {
  forget_closed();
  if (clients_.size() >= kMaxClients) {
    for (auto client = clients_.begin(); client != clients_.end();) {
      const auto next = std::next(client);
      const std::size_t left = bytes_left(client->stream.get());
      if (std::exchange(client->left, left) != left) clients_.splice(clients_.end(), clients_, client);
      client = next;
    }
    const auto latest = std::find_if(clients_.begin(), clients_.end(), [](const Client& client) {
      return !is_ready(client.stream.get(), client.has_request);
    });
    if (latest == clients_.end()) {
      event_add(full_.get(), &kAtOnce);
      return;
    }
    disconnect(latest);
  }
  evconnlistener_enable(listener_);
}

void Server::answer(evhttp_request* request) noexcept {
  bufferevent* const stream = evhttp_connection_get_bufferevent(evhttp_request_get_connection(request));
  const auto is_of_stream = [&](const Client& client) { return client.stream.get() == stream; };
  const auto client = std::find_if(clients_.begin(), clients_.end(), is_of_stream);
  if (client != clients_.end()) {
    client->has_request = true;
    client->ticks = 0;
  }
  try {
    const evhttp_cmd_type method = evhttp_request_get_command(request);
    const std::string path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
    if (method != EVHTTP_REQ_GET && method != EVHTTP_REQ_HEAD) {
      add_header(request, "Allow", "GET, HEAD");
      send(request, HTTP_BADMETHOD, "text/plain", "GET and HEAD are the only methods.\n");
    } else if (path == "/metrics") {
      send(request, HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text());
    } else if (path == "/") {
      send(request, HTTP_OK, "text/html; charset=utf-8", kRootPage);
    } else {
      send(request, HTTP_NOTFOUND, "text/plain", "Nothing is here. The metrics are at /metrics.\n");
    }
  } catch (const std::exception&) {
    evhttp_send_error(request, HTTP_SERVUNAVAIL, nullptr);
  }
  // One request of each connection: what follows it is not read. evhttp would also take the end of the client's
  // sending for the end of its reading.
  if (client != clients_.end()) bufferevent_disable(stream, EV_READ);
}

std::shared_ptr<const std::string> Server::text() {
  using Clock = std::chrono::steady_clock;
  if (text_ == nullptr || Clock::now() - text_made_ >= kTextAge) {
    text_ = std::make_shared<const std::string>(collect_());
    text_made_ = Clock::now();
  }
  return text_;
}

void Server::tick() {
  forget_closed();
  for (auto client = clients_.begin(); client != clients_.end();) {
    const bool is_late = ++client->ticks > (client->has_request ? kMaxAnswerTicks : kMaxRequestTicks);
    const bool is_done = client->has_request && bytes_left(client->stream.get()) == 0;  // evhttp leaves CONNECT open
    client = is_late || is_done ? disconnect(client) : std::next(client);
  }
  accept_again();
}

// evhttp closes a connection at the event of a time-out.
Server::Clients::iterator Server::disconnect(Clients::iterator client) {
  bufferevent_trigger_event(client->stream.get(), BEV_EVENT_READING | BEV_EVENT_TIMEOUT, 0);
  return clients_.erase(client);
}

// A connection that evhttp has closed is only closed for the system with the last reference.
void Server::forget_closed() {
  clients_.remove_if([](const Client& client) {
    bufferevent_event_cb event = nullptr;
    bufferevent_getcb(client.stream.get(), nullptr, nullptr, &event, nullptr);
    return event == nullptr;
  });
}

}  // namespace verbatim::exporter
