// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace dsec::http {
class BlockingClient;
struct ClientRequest;
}  // namespace dsec::http

namespace dsec::cli {

// Where the API is and the key to it.
struct Endpoint {
  std::string url;  // http://host:port or unix:/path
  std::string key;
};

// Flags first, then DSEC_URL / DSEC_API_KEY / DSEC_API_KEY_FILE, then the local node's address and
// key file. kUnauthenticated "auth.missing" names what could not be read.
Result<Endpoint> FindEndpoint(const std::string& url_flag, const std::string& key_flag);

// A reply that was not an error.
struct Reply {
  int status = 0;
  std::string body;
};

// Blocking calls to the API. One thread, but for Abort. An error reply becomes an Error with the
// API's code, reason, message and field; no connection, or a broken one: kUnavailable
// "client.connection".
class Connection {
 public:
  // `true` to go on, `false` to stop reading and close.
  using OnData = std::function<bool(std::string_view)>;
  // Gives the next piece of the body; empty means the end.
  using Source = std::function<Result<std::string>()>;

  explicit Connection(Endpoint endpoint);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // The whole reply, at most 64 MiB. `json` may be empty.
  Result<Reply> Call(std::string_view method, std::string_view target, std::string_view json = {});
  // Sends raw bytes of a known size.
  Result<Reply> Send(std::string_view method, std::string_view target, std::string_view bytes);
  // PUTs a body of unknown size in chunks.
  Result<Reply> Upload(std::string_view target, const Source& source);
  // Hands the reply's body out as it comes.
  Result<void> Download(std::string_view target, const OnData& on_data);
  // One JSON object a line; keepalives are left out. Their absence for 30 s is "client.timeout".
  Result<void> Stream(std::string_view method, std::string_view target, std::string_view json,
                      const OnData& on_line);
  // From any thread: ends the call under way, and all later ones, with kCancelled "client.aborted".
  void Abort();

 private:
  Result<Reply> Finish(http::ClientRequest request);

  std::string error_;  // why there is no client
  std::unique_ptr<http::BlockingClient> client_;
};

}  // namespace dsec::cli
