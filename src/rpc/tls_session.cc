// SPDX-License-Identifier: Apache-2.0
#include "rpc/tls_session.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <climits>
#include <ctime>

#include "base/check.h"

namespace dsec::rpc {
namespace {

namespace asio = boost::asio;
using runtime::Deadline;
using runtime::Task;
using Socket = FrameSocket::Socket;

// The far side of the encryption: a socket that does not block. Counts what it reads until the
// handshake is done, and raises no SIGPIPE, as OpenSSL's own would.
struct Transport {
  int fd = -1;
  size_t budget = 0;  // bytes that may still be read
  bool limited = true;
};

int TransportWrite(BIO* bio, const char* data, int size) {
  const auto* transport = static_cast<Transport*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  const ssize_t done = ::send(transport->fd, data, static_cast<size_t>(size), MSG_NOSIGNAL);
  if (done < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(done);
}

int TransportRead(BIO* bio, char* to, int size) {
  auto* transport = static_cast<Transport*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  auto wanted = static_cast<size_t>(size);
  if (transport->limited) wanted = std::min(wanted, transport->budget);
  if (wanted == 0) {
    errno = EMSGSIZE;
    return -1;
  }
  const ssize_t done = ::recv(transport->fd, to, wanted, 0);
  if (done < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
  if (done > 0 && transport->limited) transport->budget -= static_cast<size_t>(done);
  return static_cast<int>(done);
}

long TransportControl(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

int TransportDestroy(BIO* bio) {
  delete static_cast<Transport*>(BIO_get_data(bio));
  BIO_set_data(bio, nullptr);
  return 1;
}

const BIO_METHOD* TransportMethod() {
  static const BIO_METHOD* const kMethod = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "dsec socket");
    DSEC_CHECK(made != nullptr);
    BIO_meth_set_write(made, TransportWrite);
    BIO_meth_set_read(made, TransportRead);
    BIO_meth_set_ctrl(made, TransportControl);
    BIO_meth_set_destroy(made, TransportDestroy);
    return made;
  }();
  return kMethod;
}

BIO* NewTransport(int fd) {
  BIO* const bio = BIO_new(TransportMethod());
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, new Transport{.fd = fd, .budget = kMaxHandshakeBytes});
  BIO_set_init(bio, 1);
  return bio;
}

// A peer whose machine or link has died says nothing: the kernel asks it after 5 s of silence, and
// gives up what it has not acknowledged for 10 s (tcp(7)). Best effort: other sockets than TCP have
// neither.
void WatchForSilence(int fd) {
  for (const auto& [option, value] :
       {std::pair{TCP_KEEPIDLE, 5}, std::pair{TCP_KEEPINTVL, 2}, std::pair{TCP_KEEPCNT, 3},
        std::pair{TCP_USER_TIMEOUT, 10'000}}) {
    (void)::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
  }
}

// The last error of OpenSSL on this thread, as text; the queue is empty afterwards.
std::string TakeOpenSslError() {
  const unsigned long code = ERR_peek_last_error();
  std::string text;
  if (code != 0) {
    const char* reason = ERR_reason_error_string(code);
    text = reason != nullptr ? reason : fmt::format("error {:#x}", code);
  }
  ERR_clear_error();
  return text;
}

std::string FingerprintOf(const X509* certificate) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  if (X509_digest(certificate, EVP_sha256(), digest.data(), &size) != 1) return {};
  return fmt::format("{:02x}", fmt::join(digest.begin(), digest.begin() + size, ""));
}

// The one URI of a certificate.
Result<TlsName> NameOf(const X509* certificate) {
  const Error none(Code::kPermissionDenied, "rpc.tls_name",
                   "the certificate must have one URI, dsec://<cluster>/<role>/<id>");
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)),
      &GENERAL_NAMES_free);
  if (!names) return none;
  std::optional<TlsName> found;
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const auto* text = name->d.uniformResourceIdentifier;
    auto parsed = ParseTlsName({reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                                static_cast<size_t>(ASN1_STRING_length(text))});
    if (!parsed.ok() || found) return none;
    found = std::move(*parsed);
  }
  if (!found) return none;
  return *std::move(found);
}

// What one handshake checks of the peer's certificate, and what it found.
struct Verdict {
  TlsExpect expect;
  std::string cluster;
  std::optional<TlsPeer> peer;
  std::optional<Error> error;
};

int VerdictIndex() {
  static const int kIndex = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return kIndex;
}

Error NotTrusted(int code) {
  const char* text = X509_verify_cert_error_string(code);
  switch (code) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return Error(Code::kUnauthenticated, "rpc.tls_expired",
                   fmt::format("the peer's certificate: {}", text));
    default:
      return Error(Code::kUnauthenticated, "rpc.tls_untrusted",
                   fmt::format("the peer's certificate: {}", text));
  }
}

Result<int64_t> UnixMillisOf(const ASN1_TIME* time) {
  tm utc{};
  if (ASN1_TIME_to_tm(time, &utc) != 1) {
    return Error(Code::kUnauthenticated, "rpc.tls_untrusted", "a time of the certificate is none");
  }
  return int64_t{timegm(&utc)} * 1000;
}

Result<TlsPeer> CheckName(const X509* certificate, const Verdict& verdict) {
  DSEC_TRY(TlsName name, NameOf(certificate));
  const TlsExpect& expect = verdict.expect;
  const auto refuse = [&](std::string_view why) {
    return Error(Code::kPermissionDenied, "rpc.tls_name",
                 fmt::format("the peer is {}: {}", name.Uri(), why));
  };
  if (expect.pin.empty() && name.cluster != verdict.cluster) return refuse("not of this cluster");
  if (std::find(expect.roles.begin(), expect.roles.end(), name.role) == expect.roles.end()) {
    return refuse(fmt::format("its role must be {}", fmt::join(expect.roles, " or ")));
  }
  if (!expect.id.empty() && name.id != expect.id) {
    return refuse(fmt::format("{} was expected", expect.id));
  }
  TlsPeer peer{.name = std::move(name), .certificate_sha256 = FingerprintOf(certificate)};
  DSEC_TRY(peer.begins_unix_ms, UnixMillisOf(X509_get0_notBefore(certificate)));
  DSEC_TRY(peer.ends_unix_ms, UnixMillisOf(X509_get0_notAfter(certificate)));
  return peer;
}

}  // namespace

// In place of OpenSSL's own: also checks the name, so that a peer that is not the right one is told
// by an alert and never counts as connected.
int internal::VerifyPeer(X509_STORE_CTX* store, void*) {
  auto* ssl =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* verdict = static_cast<Verdict*>(SSL_get_ex_data(ssl, VerdictIndex()));
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> pinned(
      sk_X509_new_null(), [](STACK_OF(X509) * stack) { sk_X509_free(stack); });
  if (!verdict->expect.pin.empty()) {
    const STACK_OF(X509)* sent = X509_STORE_CTX_get0_untrusted(store);
    for (int i = 0; i < sk_X509_num(sent); ++i) {
      X509* const one = sk_X509_value(sent, i);
      if (FingerprintOf(one) == verdict->expect.pin) sk_X509_push(pinned.get(), one);
    }
    X509_STORE_CTX_set0_trusted_stack(store, pinned.get());
  }
  if (X509_verify_cert(store) != 1) {
    verdict->error = NotTrusted(X509_STORE_CTX_get_error(store));
    return 0;
  }
  auto peer = CheckName(X509_STORE_CTX_get0_cert(store), *verdict);
  if (!peer.ok()) {
    verdict->error = std::move(peer).error();
    X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
    return 0;
  }
  verdict->peer = std::move(*peer);
  return 1;
}

TlsSession::~TlsSession() { SSL_free(ssl_); }

ssize_t TlsSession::Outcome(int returned) {
  wants_write_ = false;
  const int sys_errno = errno;
  switch (SSL_get_error(ssl_, returned)) {
    case SSL_ERROR_WANT_WRITE:
      wants_write_ = true;
      [[fallthrough]];
    case SSL_ERROR_WANT_READ:
      errno = EAGAIN;
      return -1;
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    case SSL_ERROR_SYSCALL:
      broken_ = true;
      ERR_clear_error();
      if (sys_errno == 0) return 0;
      errno = sys_errno;
      return -1;
    default:
      broken_ = true;
      why_ = TakeOpenSslError();
      errno = EPROTO;
      return -1;
  }
}

ssize_t TlsSession::Read(char* to, size_t size) {
  size_t done = 0;
  while (done < size) {
    ERR_clear_error();
    errno = 0;
    const int got =
        SSL_read(ssl_, to + done, static_cast<int>(std::min<size_t>(size - done, INT_MAX)));
    if (got > 0) {
      done += static_cast<size_t>(got);
      continue;
    }
    drained_ = SSL_get_error(ssl_, got) == SSL_ERROR_WANT_READ;
    // What has come is given first; the failure comes again.
    if (done > 0) break;
    return Outcome(got);
  }
  if (done == size) drained_ = false;
  ERR_clear_error();
  return static_cast<ssize_t>(done);
}

ssize_t TlsSession::Write(const char* from, size_t size) {
  ERR_clear_error();
  errno = 0;
  const int took = SSL_write(ssl_, from, static_cast<int>(std::min<size_t>(size, INT_MAX)));
  if (took > 0) return took;
  const ssize_t outcome = Outcome(took);
  if (outcome == 0) errno = EPIPE;
  return -1;
}

void TlsSession::Shutdown() {
  if (broken_) return;  // as SSL_shutdown(3) asks for
  (void)SSL_shutdown(ssl_);
  ERR_clear_error();
}

// Makes sessions; the one place that knows how.
class TlsHandshake {
 public:
  TlsHandshake(std::shared_ptr<const TlsContext> context, TlsSide side, TlsExpect expect,
               std::string peer)
      : context_(std::move(context)), side_(side), peer_(std::move(peer)) {
    verdict_.expect = std::move(expect);
    verdict_.cluster = context_->cluster();
  }

  Result<void> Begin(int fd) {
    ERR_clear_error();
    SSL* const ssl = SSL_new(context_->raw());
    BIO* const bio = ssl != nullptr ? NewTransport(fd) : nullptr;
    if (bio == nullptr) {
      SSL_free(ssl);
      return Error(Code::kResourceExhausted, "rpc.tls", "no memory for a session");
    }
    session_.reset(new TlsSession(context_, ssl));
    SSL_set_bio(ssl, bio, bio);
    int mode = SSL_VERIFY_PEER;
    if (!verdict_.expect.anonymous) mode |= SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
    SSL_set_verify(ssl, mode, nullptr);
    if (SSL_set_ex_data(ssl, VerdictIndex(), &verdict_) != 1) {
      return Error(Code::kResourceExhausted, "rpc.tls", "no memory for a session");
    }
    if (side_ == TlsSide::kClient) {
      SSL_set_connect_state(ssl);
    } else {
      SSL_set_accept_state(ssl);
    }
    return Ok();
  }

  // True when it is done; false: wait as the session says.
  Result<bool> Step() {
    ERR_clear_error();
    errno = 0;
    const int done = SSL_do_handshake(session_->ssl_);
    if (done == 1) return true;
    const unsigned long code = ERR_peek_last_error();
    const bool no_certificate = ERR_GET_LIB(code) == ERR_LIB_SSL &&
                                ERR_GET_REASON(code) == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE;
    const ssize_t outcome = session_->Outcome(done);
    if (outcome < 0 && errno == EAGAIN) return false;
    const int sys_errno = outcome == 0 ? 0 : errno;
    if (verdict_.error) return std::move(*verdict_.error).Context("{}", peer_);
    if (no_certificate) {
      return Error(Code::kUnauthenticated, "rpc.tls_no_certificate",
                   fmt::format("{} has shown no certificate", peer_));
    }
    std::string why = session_->why();
    if (why.empty() && sys_errno == EMSGSIZE) why = "its handshake is too long";
    if (why.empty() && sys_errno != 0) why = strerrordesc_np(sys_errno);
    if (why.empty()) why = "it hung up";
    return Error(Code::kUnavailable, "rpc.tls", fmt::format("TLS with {}: {}", peer_, why))
        .WithErrno(sys_errno == EPROTO ? 0 : sys_errno);
  }

  bool wants_write() const { return session_->wants_write(); }

  std::unique_ptr<TlsSession> Finish() {
    auto* transport = static_cast<Transport*>(BIO_get_data(SSL_get_rbio(session_->ssl_)));
    transport->limited = false;
    (void)SSL_set_ex_data(session_->ssl_, VerdictIndex(), nullptr);
    session_->peer_ = std::move(verdict_.peer);
    return std::move(session_);
  }

 private:
  const std::shared_ptr<const TlsContext> context_;
  const TlsSide side_;
  const std::string peer_;
  Verdict verdict_;
  std::unique_ptr<TlsSession> session_;
};

Task<TlsSocket> ShakeHands(Socket given, std::shared_ptr<const TlsContext> context, TlsSide side,
                           TlsExpect expect, std::string peer, Deadline deadline) {
  const auto executor = given.get_executor();
  const auto socket = std::make_shared<Socket>(std::move(given));
  boost::system::error_code failed;
  socket->non_blocking(true, failed);
  if (failed) {
    co_return Error(Code::kUnavailable, "rpc.tls", failed.message()).WithErrno(failed.value());
  }
  WatchForSilence(socket->native_handle());
  TlsHandshake handshake(std::move(context), side, std::move(expect), peer);
  DSEC_CO_TRY_VOID(handshake.Begin(socket->native_handle()));
  // Closing the socket is what ends a wait that takes too long.
  asio::steady_timer timer(executor, deadline.at());
  timer.async_wait([weak = std::weak_ptr(socket)](const boost::system::error_code& error) {
    const auto pending = weak.lock();
    boost::system::error_code ignored;
    if (!error && pending) pending->close(ignored);
  });
  for (;;) {
    DSEC_CO_TRY(const bool done, handshake.Step());
    if (done) break;
    const auto [error] = co_await socket->async_wait(
        handshake.wants_write() ? Socket::wait_write : Socket::wait_read,
        asio::as_tuple(asio::use_awaitable));
    if (!socket->is_open()) {
      co_return Error(Code::kDeadlineExceeded, "rpc.deadline",
                      fmt::format("TLS with {}: no handshake in time", peer));
    }
    if (error == asio::error::operation_aborted) {
      co_return Error(Code::kCancelled, "task.cancelled", "the task was cancelled");
    }
    if (error) {
      co_return Error(Code::kUnavailable, "rpc.tls",
                      fmt::format("TLS with {}: {}", peer, error.message()));
    }
  }
  timer.cancel();
  TlsSocket out{std::move(*socket), handshake.Finish()};
  co_return std::move(out);
}

}  // namespace dsec::rpc
