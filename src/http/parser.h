// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "http/message.h"

namespace dsec::http {

// Cuts HTTP/1 messages out of the bytes of one connection; no I/O. Stricter than RFC 9112 where
// leniency lets two parsers disagree about where a message ends: Content-Length beside
// Transfer-Encoding, either of them twice or as a list, and any transfer coding but "chunked" are
// refused. After an error nothing more can be read from the connection.
//
// One message: Head with the bytes at hand until head_done, then Body until body_done, then Reset.
template <typename HeadType>
class Parser {
 public:
  explicit Parser(size_t max_head_bytes);
  ~Parser();
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  void Reset();

  // Reads on from the front of `data` and returns how many bytes were used; the caller keeps the
  // others and comes again with more behind them. kInvalidArgument "request.malformed" and the
  // reasons of StatusOf.
  Result<size_t> Head(std::string_view data);
  bool head_started() const;
  bool head_done() const;
  const HeadType& head() const;

  // Appends at most `max` bytes of the body to `out` and returns how many bytes of `data` were
  // used.
  Result<size_t> Body(std::string_view data, size_t max, std::string& out);
  bool body_done() const;
  // Bytes that are known to come without further framing: the caller may read so many by itself and
  // account for them with Skip. 0 when chunked.
  uint64_t plain_left() const;
  void Skip(uint64_t bytes);
  // The peer has closed: ends a reply that is delimited so. An error when the message is not
  // complete.
  Result<void> End();

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

using RequestParser = Parser<RequestHead>;
using ResponseParser = Parser<ResponseHead>;
extern template class Parser<RequestHead>;
extern template class Parser<ResponseHead>;

}  // namespace dsec::http
