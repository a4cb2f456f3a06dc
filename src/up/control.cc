// SPDX-License-Identifier: Apache-2.0
#include "up/control.h"

#include <utility>

#include "base/log.h"
#include "runtime/async_event.h"
#include "store/etcd_store.h"
#include "store/sqlite_store.h"

namespace dsec::up {

Result<std::unique_ptr<Control>> Control::Open(const config::NodeConfig& config,
                                               const std::string& api_key,
                                               runtime::Shards& shards) {
  std::unique_ptr<Control> made(new Control());
  auto opened = made->OpenParts(config, api_key, shards.at(0));
  if (!opened.ok()) {
    made->Close(shards);
    return std::move(opened).error();
  }
  return made;
}

Result<std::unique_ptr<Control>> Control::OpenForEdge(const config::NodeConfig& config,
                                                      runtime::Shards& shards) {
  std::unique_ptr<Control> made(new Control());
  auto opened = made->OpenStore(config, shards.at(0));
  if (!opened.ok()) {
    made->Close(shards);
    return std::move(opened).error();
  }
  made->OpenQuota(config, shards.at(0));
  iam::DirectoryOptions options;
  options.cache_max = std::chrono::milliseconds(config.iam_cache_max_ms);
  made->opening_ = runtime::SpawnCancellable(made->gate_, shards.at(0),
                                             made->OpenDirectoryLater(shards.at(0), options));
  return made;
}

Result<void> Control::OpenStore(const config::NodeConfig& config, const runtime::Executor& home) {
  if (config.etcd.empty()) {
    DSEC_TRY(store_,
             store::SqliteStore::Open(config.state_dir + "/control.db", home, Clock::System()));
    return Ok();
  }
  store::EtcdOptions etcd;
  etcd.endpoints = config::SplitList(config.etcd);
  etcd.prefix = config.etcd_prefix;
  DSEC_TRY(store_, store::EtcdStore::Open(home, std::move(etcd)));
  return Ok();
}

void Control::OpenQuota(const config::NodeConfig& config, const runtime::Executor& home) {
  iam::QuotaOptions quota;
  quota.node_id = config.node_id;
  quota.limits = [known = limits_](const iam::ProjectPath& project) -> std::optional<iam::Limits> {
    const iam::Directory* const directory = known->load();
    if (directory == nullptr) return std::nullopt;
    return directory->Now()->LimitsOf(project);
  };
  quota.freed = [told = told_] {
    if (edge::Edge* const edge = told->load()) edge->QuotaFreed();
  };
  quota_ = std::make_unique<iam::QuotaKeeper>(*store_, home, std::move(quota));
}

boost::asio::awaitable<void> Control::OpenDirectoryLater(runtime::Executor home,
                                                         iam::DirectoryOptions options) {
  for (bool told = false;; told = true) {
    auto opened = co_await iam::Directory::Open(*store_, home, options);
    if (opened.ok()) {
      directory_ = *std::move(opened);
      directory_->OnChange([keeper = quota_.get()] { keeper->LimitsChanged(); });
      limits_->store(directory_.get());
      quota_->LimitsChanged();
      co_return;
    }
    if (!told) log::Warn("node.limits_unknown", {{"error", opened.error()}});
    auto slept = co_await runtime::SleepUntil(runtime::Deadline::After(std::chrono::seconds(1)));
    if (!slept.ok()) co_return;
  }
}

Result<void> Control::OpenParts(const config::NodeConfig& config, const std::string& api_key,
                                const runtime::Executor& home) {
  DSEC_TRY_VOID(OpenStore(config, home));
  iam::AuditOptions audit;
  audit.keep = config.audit_records;
  DSEC_TRY(audit_, iam::AuditLog::Open(config.state_dir + "/audit.db", home, audit));
  iam::DirectoryOptions options;
  options.root_key = iam::DigestOf(api_key);
  options.cache_max = std::chrono::milliseconds(config.iam_cache_max_ms);
  DSEC_TRY(directory_, runtime::BlockOn(home, iam::Directory::Open(*store_, home, options)));
  limits_->store(directory_.get());
  OpenQuota(config, home);
  directory_->OnChange([keeper = quota_.get()] { keeper->LimitsChanged(); });
  return Ok();
}

Control::~Control() {
  told_->store(nullptr);
  quota_.reset();
  limits_->store(nullptr);
  directory_.reset();
  audit_.reset();
  store_.reset();
}

void Control::Settle(runtime::Shards& shards) {
  auto restored = runtime::BlockOn(shards.at(0), quota_->Restore());
  // It is tried again each second.
  if (!restored.ok()) log::Warn("node.quota_not_restored", {{"error", restored.error()}});
}

void Control::Close(runtime::Shards& shards) {
  if (!stopped_) (void)runtime::BlockOn(shards.at(0), Stop());
}

runtime::Task<void> Control::Stop() {
  stopped_ = true;
  opening_.Cancel();
  co_await gate_.Close();
  if (directory_) (void)co_await directory_->Stop();
  if (quota_) (void)co_await quota_->Stop();
  if (audit_) (void)co_await audit_->Stop();
  co_return Ok();
}

}  // namespace dsec::up
