// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "rpc/socket.h"
#include "rpc/tls.h"
#include "runtime/deadline.h"
#include "runtime/task.h"

struct ssl_st;
struct x509_store_ctx_st;

namespace dsec::rpc {

// TLS over one connected socket whose handshake is done. Reads and writes as recv(2) and send(2) of
// a socket that does not block do. Between records it holds no buffers. One shard.
class TlsSession {
 public:
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Bytes; 0 at the end; -1 with errno. EAGAIN: wait until the socket is readable, or writable when
  // wants_write(). EPROTO: why() tells.
  ssize_t Read(char* to, size_t size);
  // After EAGAIN the same bytes must come again, and may be followed by more.
  ssize_t Write(const char* from, size_t size);
  bool wants_write() const { return wants_write_; }
  // Bytes, or an end, may be here that no event of the socket will announce: the last Read did not
  // run into the end of what has come. Half a record is nothing of the kind.
  bool pending() const { return !drained_; }
  // Tells the peer that nothing more comes, if the socket takes it now.
  void Shutdown();
  const std::string& why() const { return why_; }
  // Nullopt: it came without a certificate.
  const std::optional<TlsPeer>& peer() const { return peer_; }

 private:
  friend class TlsHandshake;
  TlsSession(std::shared_ptr<const TlsContext> context, ssl_st* ssl)
      : context_(std::move(context)), ssl_(ssl) {}
  ssize_t Outcome(int returned);

  const std::shared_ptr<const TlsContext> context_;
  ssl_st* const ssl_;
  bool wants_write_ = false;
  bool broken_ = false;
  bool drained_ = false;
  std::string why_;
  std::optional<TlsPeer> peer_;
};

struct TlsSocket {
  FrameSocket::Socket socket;
  std::unique_ptr<TlsSession> session;
};

namespace internal {
// What TlsContext has OpenSSL call for the certificate of a peer.
int VerifyPeer(x509_store_ctx_st* store, void*);
}  // namespace internal

enum class TlsSide { kClient, kServer };

// At most this many bytes are read of a peer before its handshake is done.
inline constexpr size_t kMaxHandshakeBytes = size_t{64} << 10;

// Shakes hands. `peer` names the other end in messages.
//  - kUnauthenticated rpc.tls_no_certificate, rpc.tls_untrusted (no CA of ours, or not made for
//  this), rpc.tls_expired (or not valid yet)
//  - kPermissionDenied rpc.tls_name: its name is none, or not of our cluster, or has a role or id
//  that is not expected
//  - kUnavailable rpc.tls: it does not speak TLS 1.3, refused us (its alert is in the message) or
//  hung up
//  - kDeadlineExceeded rpc.deadline; kCancelled task.cancelled
runtime::Task<TlsSocket> ShakeHands(FrameSocket::Socket socket,
                                    std::shared_ptr<const TlsContext> context, TlsSide side,
                                    TlsExpect expect, std::string peer, runtime::Deadline deadline);

}  // namespace dsec::rpc
