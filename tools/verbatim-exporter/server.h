// Serves text over HTTP.
#pragma once

#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

namespace verbatim::exporter {

template <auto free_function>
struct Free {
  template <typename Object>
  void operator()(Object* object) const {
    free_function(object);
  }
};

// Answers GET /metrics, one request of each connection. Used by one thread, which makes each scrape too: clients wait
// meanwhile, and that time counts for none of them. All requests that wait get one text, and those of the next second.
//
// Any process that reaches the address can connect, so what clients can take is limited: connections, the bytes of a
// request, scrapes and their texts in memory, and the time of a request and of an answer. Where there is no place for
// another client, that one is disconnected that has neither connected nor taken something of its answer for the longest
// time. What it has sent was read before, so a client that sends its request at once and reads its answer keeps its
// place although many others come.
class Server {
 public:
  // `address`: "127.0.0.1:9477", "[::1]:0". `collect`: the text of a scrape. Throws cli::Failure.
  Server(const std::string& address, std::function<std::string()> collect);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::uint16_t port() const;

  void end_at(int signal);  // run() returns when the process has got it
  void run();

 private:
  struct Client {
    // evhttp has another reference. When it has closed the connection, it has removed its callbacks.
    std::unique_ptr<bufferevent, Free<bufferevent_decref>> stream;
    bool has_request = false;  // a whole one: it is answered
    int ticks = 0;             // since it has connected, or its request was complete
    std::size_t left = 0;      // bytes of the answer, when accept_again() last looked
  };
  using Clients = std::list<Client>;  // first who has been without progress for the longest time

  bufferevent* add_client() noexcept;  // libevent calls these, and is no place for exceptions
  void answer(evhttp_request* request) noexcept;
  std::shared_ptr<const std::string> text();
  void tick();
  void accept_again();
  Clients::iterator disconnect(Clients::iterator client);
  void forget_closed();

  const std::function<std::string()> collect_;
  std::unique_ptr<event_base, Free<event_base_free>> base_;
  std::unique_ptr<evhttp, Free<evhttp_free>> http_;
  evconnlistener* listener_ = nullptr;  // of http_
  Clients clients_;
  std::shared_ptr<const std::string> text_;
  std::chrono::steady_clock::time_point text_made_;
  std::vector<std::unique_ptr<event, Free<event_free>>> events_;
  std::unique_ptr<event, Free<event_free>> full_;  // there is no place for another client
};

}  // namespace verbatim::exporter
