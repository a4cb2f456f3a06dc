// SPDX-License-Identifier: Apache-2.0
#include "iam/audit_log.h"

#include <utility>

#include "base/log.h"

namespace dsec::iam {
namespace {

using runtime::Task;

constexpr int64_t kSchemaVersion = 1;
constexpr size_t kMaxPending = 50'000;
constexpr uint64_t kMaxLook = 20'000;
constexpr const char* kSchema =
    "CREATE TABLE IF NOT EXISTS audit(seq INTEGER PRIMARY KEY, record BLOB NOT NULL);";

}  // namespace

Result<std::unique_ptr<AuditLog>> AuditLog::Open(const std::string& path,
                                                 runtime::Executor executor, AuditOptions options) {
  DSEC_TRY(auto database, store::Database::Open(path));
  std::unique_ptr<AuditLog> log(new AuditLog(std::move(database), options));
  DSEC_TRY_VOID(log->Prepare().Context("open {}", path));
  log->pool_ = std::make_unique<runtime::BlockingPool>("audit", 1, 4096);
  auto* const raw = log.get();
  log->flusher_ = std::make_unique<runtime::Periodic>(
      std::move(executor), "iam.audit", options.flush_every, [raw] { return raw->Flush(); });
  return log;
}

AuditLog::AuditLog(store::Database database, AuditOptions options)
    : options_(options), database_(std::move(database)) {}

AuditLog::~AuditLog() {
  flusher_.reset();
  pool_.reset();
  if (auto written = Write(); !written.ok())
    log::Error("iam.audit_not_written", {{"error", written.error()}});
}

Task<void> AuditLog::Stop() {
  co_await flusher_->Join();
  co_return Ok();
}

Result<void> AuditLog::Prepare() {
  DSEC_TRY(auto version, database_.Prepare("PRAGMA user_version"));
  DSEC_TRY_VOID(version.Step());
  if (version.Int(0) > kSchemaVersion) {
    return Error(Code::kInternal, "store.version", "the file was written by a later dsec");
  }
  version.Reset();
  DSEC_TRY_VOID(database_.Execute(kSchema));
  DSEC_TRY_VOID(database_.Execute(fmt::format("PRAGMA user_version={}", kSchemaVersion).c_str()));
  DSEC_TRY(insert_, database_.Prepare("INSERT INTO audit(seq, record) VALUES(?1, ?2)"));
  DSEC_TRY(read_, database_.Prepare(
                      "SELECT seq, record FROM audit WHERE seq<?1 ORDER BY seq DESC LIMIT ?2"));
  DSEC_TRY(prune_, database_.Prepare("DELETE FROM audit WHERE seq<=?1"));
  DSEC_TRY(auto newest, database_.Prepare("SELECT ifnull(max(seq), 0) FROM audit"));
  DSEC_TRY_VOID(newest.Step());
  next_seq_ = static_cast<uint64_t>(newest.Int(0)) + 1;
  return Ok();
}

void AuditLog::Add(v1::IamAuditRecord record) {
  std::lock_guard lock(mutex_);
  if (pending_.size() >= kMaxPending) {
    ++lost_;
    return;
  }
  pending_.push_back(std::move(record));
}

void AuditLog::AddRefusal(v1::IamAuditRecord record) {
  {
    std::lock_guard lock(mutex_);
    const int64_t second = UnixMillis(options_.clock->Wall()) / 1000;
    if (std::exchange(second_, second) != second) refusals_ = 0;
    if (++refusals_ > options_.refusals_per_second) {
      ++lost_;
      return;
    }
  }
  Add(std::move(record));
}

Task<void> AuditLog::AddNow(v1::IamAuditRecord record) {
  Add(std::move(record));
  auto write = [this] { return Write(); };
  auto written = co_await pool_->Run(std::move(write), runtime::Deadline::Never());
  co_return written;
}

boost::asio::awaitable<void> AuditLog::Flush() {
  {
    std::lock_guard lock(mutex_);
    if (pending_.empty() && lost_ == 0) co_return;
  }
  auto write = [this] { return Write(); };
  auto written = co_await pool_->Run(std::move(write), runtime::Deadline::Never());
  if (!written.ok()) log::Error("iam.audit_not_written", {{"error", written.error()}});
}

Result<void> AuditLog::Write() {
  std::vector<v1::IamAuditRecord> taken;
  {
    std::lock_guard lock(mutex_);
    taken.swap(pending_);
    if (const uint64_t lost = std::exchange(lost_, 0); lost > 0) {
      v1::IamAuditRecord gap;
      gap.set_at_unix_ms(UnixMillis(options_.clock->Wall()));
      gap.set_action("audit.gap");
      gap.set_outcome(fmt::format("{} records were only counted", lost));
      taken.push_back(std::move(gap));
    }
  }
  if (taken.empty()) return Ok();
  DSEC_TRY(auto transaction, store::Transaction::Begin(database_));
  uint64_t seq = next_seq_;
  for (const v1::IamAuditRecord& record : taken) {
    const std::string bytes = record.SerializeAsString();
    DSEC_TRY_VOID(insert_.Bind(1, static_cast<int64_t>(seq++)).BindBlob(2, bytes).Run());
  }
  if (seq > options_.keep + 1)
    DSEC_TRY_VOID(prune_.Bind(1, static_cast<int64_t>(seq - 1 - options_.keep)).Run());
  DSEC_TRY_VOID(transaction.Commit());
  next_seq_ = seq;
  return Ok();
}

Task<AuditLog::Page> AuditLog::List(uint64_t before, uint32_t limit, Wanted wanted,
                                    runtime::Deadline deadline) {
  auto read = [this, before, limit, wanted = std::move(wanted)]() -> Result<Page> {
    DSEC_TRY_VOID(Write());
    return Read(before, limit, wanted);
  };
  auto page = co_await pool_->Run(std::move(read), deadline);
  co_return page;
}

Result<AuditLog::Page> AuditLog::Read(uint64_t before, uint32_t limit, const Wanted& wanted) {
  Page page;
  read_.Bind(1, before == 0 ? INT64_MAX : static_cast<int64_t>(before))
      .Bind(2, static_cast<int64_t>(kMaxLook));
  uint64_t looked = 0;
  while (true) {
    DSEC_TRY(const bool row, read_.Step());
    if (!row) break;
    const auto seq = static_cast<uint64_t>(read_.Int(0));
    page.next = seq;
    ++looked;
    v1::IamAuditRecord record;
    const std::string_view bytes = read_.Blob(1);
    if (!record.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || !wanted(record))
      continue;
    page.items.push_back({seq, std::move(record)});
    if (page.items.size() == limit) {
      read_.Reset();
      return page;
    }
  }
  if (looked < kMaxLook) page.next = 0;
  return page;
}

}  // namespace dsec::iam
