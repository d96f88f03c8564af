// The TCP sockets of this process: one for connect requests, and one on each further interface, because peers may make
// side channels again over any of them. Each listen, for messages or for RMA, has a secret. A hello begins with the
// name of the listen and a new attempt number. If its MAC shows the secret, it is a connect request for the listen,
// which understands the rest. Until the name has come, a connection costs its descriptor and less than 1 KiB. A
// connection with another protocol version gets a reject, and so does one that names a listen and does not show its
// secret; any other connection is closed without a reply. The listener has no thread: each call of poll serves the
// connections of all listens. While connections are established, the monitor calls it too, when a socket is readable.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/socket_interface.h"
#include "base/unique_fd.h"
#include "channel/incoming_message.h"
#include "channel/key_exchange.h"
#include "runtime/event_loop.h"
#include "wire/authentication.h"
#include "wire/handshake.h"

namespace verbatim {

// A peer whose hello shows the secret of a listen.
struct ConnectRequest {
  UniqueFd socket;
  IncomingMessage hello;
};

constexpr const char* kListenClosed = "its application has closed its listen";

// Sends the peer a reject, if the socket accepts it at once: the peer sees the end of file in any case.
void reject(const UniqueFd& socket, const std::string& reason, std::uint16_t version = wire::kProtocolVersion);

class Listener {
 public:
  // `address`, with port 0, is for connect requests; those of `interfaces` but the first, which has `address`, are only
  // for side channels that are made again. At most wire::kMaxAddresses are used. The sockets are open while there are
  // listens, connections or holders. The first uses the same port each time, and the others its port, if it is free.
  // `own`, `psk`: as in KeyExchange; without `own` no peer accepts a hello.
  explicit Listener(const sockaddr_storage& address, std::span<const SocketInterface> interfaces = {},
                    const wire::KeyPair& own = {}, std::span<const std::uint8_t> psk = {});
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // What hellos to this process and from it need.
  KeyExchange& keys() { return keys_; }

  // Returns the address for the peers' connects. `arrival`, if it is not -1, is an eventfd that is written when there
  // is a connect request, because another thread may have read its hello.
  Result<sockaddr_storage> add(const wire::Secret& secret, int arrival = -1) VERBATIM_EXCLUDES(mutex_);
  // Rejects the connect requests for `id`. When no listen and no connection is left, also closes the pending
  // connections and the socket.
  void remove(const wire::ListenId& id) noexcept VERBATIM_EXCLUDES(mutex_);

  // Under which peers may make side channels again, the address for connect requests first. Empty when this process
  // cannot listen. With `hold` the sockets stay open until release().
  enum class Use : bool { kLook, kHold };
  std::vector<wire::Address> addresses(Use use) VERBATIM_EXCLUDES(mutex_);
  void release() noexcept VERBATIM_EXCLUDES(mutex_);
  // Where neither a connection is left nor a listen that is polled all the time, its holders accept connections and
  // read hellos: their peers must learn that their listen is closed.
  void serve() VERBATIM_EXCLUDES(mutex_);

  // Accepts connections and reads hellos, for all listens. Returns the connect requests for `id` since the last
  // call.
  Result<std::vector<ConnectRequest>> poll(const wire::ListenId& id) VERBATIM_EXCLUDES(mutex_);
  // Appends the sockets that a thread waits for before it calls poll() again. Returns the time when it calls it in any
  // case, UINT64_MAX: none. Another thread may close a socket or accept a connection meanwhile, so the thread also
  // looks again after a while.
  std::uint64_t await(std::vector<pollfd>& sockets) VERBATIM_EXCLUDES(mutex_);

  // From now on the peer of this end may make the side channel again, with requests that show `session`, the key of the
  // connection, and have increasing numbers. `key`: the caller's own. True: it is the only connection. These functions
  // take no other mutex, so the monitor calls the first and the third under that of its table.
  bool add_connection(const wire::ConnectionEnd& end, const wire::Key& session, int key) VERBATIM_EXCLUDES(mutex_);
  // Likewise, of an end with a handler of its own: it is called when the peer has done so.
  bool add_connection(const wire::ConnectionEnd& end, const wire::Key& session, EventHandler& handler)
      VERBATIM_EXCLUDES(mutex_);
  // `last`: the notice for a peer that makes the side channel again later, kClose or kFailed; nullopt: the peer has
  // ended the connection.
  void remove_connection(const wire::ConnectionEnd& end, const wire::Key& session,
                         std::optional<wire::MessageType> last) noexcept VERBATIM_EXCLUDES(mutex_);
  struct Resumed {
    wire::ConnectionEnd end;
    int key;               // of add_connection()
    std::uint64_t number;  // of the request
    UniqueFd socket;
  };
  // The side channels that peers have made since the last call, at most one of each connection. It may log. The
  // connection may have been removed since. Calls `watch` before, with each descriptor that becomes readable when a
  // peer makes a side channel again, while it cannot be closed.
  std::vector<Resumed> take_resumed(const std::function<void(int descriptor)>& watch) VERBATIM_EXCLUDES(mutex_);
  // That of an end with a handler.
  std::optional<Resumed> take_resumed(const wire::ConnectionEnd& end) VERBATIM_EXCLUDES(mutex_);
  // While there are any, take_resumed() of all is to be called.
  bool has_connections() VERBATIM_EXCLUDES(mutex_);

 private:
  // A TCP connection whose hello is not complete yet.
  struct PendingConnection {
    UniqueFd socket;
    std::uint64_t accepted_ns = 0;
    IncomingMessage message;
  };
  struct Connection {
    wire::Key session{};
    int key = -1;
    EventHandler* handler = nullptr;  // nullptr: known by its key
    std::uint64_t number = 0;         // of the last request to make the side channel again
  };
  struct RemovedConnection {
    wire::ConnectionEnd end;
    wire::Key session;
    std::uint64_t number;  // as in Connection
    wire::MessageType last;
  };
  struct Listen {
    wire::Key key{};  // of the hellos
    int arrival = -1;
    std::vector<ConnectRequest> requests;
    std::set<std::uint64_t> attempts;  // of all hellos so far, to detect a replay
  };

  // One interface. The port of `address` is 0 until the socket was open for the first time.
  struct Socket {
    sockaddr_storage address;
    UniqueFd socket;
  };

  Status open() VERBATIM_REQUIRES(mutex_);
  static Status open(Socket& one);
  void open_further() VERBATIM_REQUIRES(mutex_);
  // Whether a further connection must wait in the backlog: the others have not had their time.
  bool is_full(std::uint64_t now) const VERBATIM_REQUIRES(mutex_);
  void read_pending() VERBATIM_REQUIRES(mutex_);
  Status accept_pending() VERBATIM_REQUIRES(mutex_);
  Status accept_pending(const UniqueFd& socket) VERBATIM_REQUIRES(mutex_);
  // True: the hello is not complete. Otherwise it has become a connect request, or the connection is to be closed.
  bool read_hello(PendingConnection& pending) VERBATIM_REQUIRES(mutex_);
  void resume(PendingConnection& pending) VERBATIM_REQUIRES(mutex_);
  void close_if_unused() VERBATIM_REQUIRES(mutex_);
  Status report_resource_shortage(const Error& error) VERBATIM_REQUIRES(mutex_);
  void reject_version(const UniqueFd& socket, std::uint16_t version) VERBATIM_REQUIRES(mutex_);
  void reject_mac(const UniqueFd& socket) VERBATIM_REQUIRES(mutex_);

  KeyExchange keys_;
  Mutex mutex_;
  std::vector<Socket> sockets_ VERBATIM_GUARDED_BY(mutex_);  // the first is the one for connect requests
  std::size_t holders_ VERBATIM_GUARDED_BY(mutex_) = 0;
  bool shortage_reported_ VERBATIM_GUARDED_BY(mutex_) = false;  // accept fails for lack of descriptors or memory
  bool version_mismatch_reported_ VERBATIM_GUARDED_BY(mutex_) = false;
  bool wrong_mac_reported_ VERBATIM_GUARDED_BY(mutex_) = false;
  std::list<PendingConnection> pending_ VERBATIM_GUARDED_BY(mutex_);
  std::map<wire::ListenId, Listen> listens_ VERBATIM_GUARDED_BY(mutex_);
  std::map<wire::ConnectionEnd, Connection> connections_ VERBATIM_GUARDED_BY(mutex_);
  std::deque<RemovedConnection> removed_ VERBATIM_GUARDED_BY(mutex_);  // the oldest first
  std::map<wire::ConnectionEnd, UniqueFd> resumed_ VERBATIM_GUARDED_BY(mutex_);
};

}  // namespace verbatim
