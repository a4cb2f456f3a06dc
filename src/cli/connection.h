// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

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
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;
};

// Blocking HTTP/1.1 to the API, one connection that is reopened when it was closed. One thread. An
// error reply becomes an Error with the API's code; its dotted reason is in the message in front of
// the text, "layer.not_found: ...".
class Connection {
 public:
  // `true` to go on, `false` to stop reading and close.
  using OnData = std::function<bool(std::string_view)>;
  // Fills `out` with up to 256 KiB more of the body; empty means the end.
  using Source = std::function<Result<std::string>()>;

  explicit Connection(Endpoint endpoint);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // The whole reply, at most 64 MiB. `json` may be empty.
  Result<Reply> Call(std::string_view method, std::string_view target, std::string_view json = {});
  // Sends raw bytes of a known size.
  Result<Reply> Send(std::string_view method, std::string_view target, std::string_view bytes);
  // Sends a body of unknown size in chunks.
  Result<Reply> Upload(std::string_view target, const Source& source);
  // Hands the reply's body out as it comes.
  Result<void> Download(std::string_view target, const OnData& on_data);
  // One JSON object a line; keepalives are left out.
  Result<void> Stream(std::string_view method, std::string_view target, std::string_view json,
                      const OnData& on_line);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dsec::cli
