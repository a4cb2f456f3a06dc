// SPDX-License-Identifier: Apache-2.0
#include "blobfs/chunk_loader.h"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <set>

#include "base/check.h"
#include "base/log.h"
#include "image/layer_files.h"

namespace dsec::blobfs {
namespace {

constexpr size_t kAlign = 4096;
// Together in one call on the source, if they are missing side by side.
constexpr uint64_t kRunBytes = 1 << 20;
// A read whose chunks went again before it got all of them holds on to them from then on.
constexpr int kPatientRounds = 2;

size_t RoundUp(size_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace

Buffer::Buffer(size_t size)
    : data_(static_cast<uint8_t*>(std::aligned_alloc(kAlign, RoundUp(std::max<size_t>(size, 1))))),
      size_(size) {
  DSEC_CHECK(data_ != nullptr);
  std::fill(data_ + size, data_ + RoundUp(size), uint8_t{0});
}

Buffer::~Buffer() { std::free(data_); }

// One call on the source: chunks [first, first + count).
struct Layer::Fetch {
  std::shared_ptr<Layer> layer;
  uint64_t first = 0;
  uint64_t count = 0;
  std::vector<std::shared_ptr<ChunkLoader::Job>> waiters;
  // What has come of it, by chunk:
  std::vector<std::shared_ptr<const Buffer>> buffers;
  std::vector<std::optional<Error>> errors;
};

struct ChunkLoader::Job {
  std::shared_ptr<Layer> layer;
  uint64_t offset = 0;
  uint32_t size = 0;
  Done done;         // empty: answered or cancelled
  std::mutex mutex;  // of done
  // Of the lock of the loader:
  size_t waiting = 0;  // fetches
  int rounds = 0;
  std::optional<Error> error;
  std::map<uint64_t, std::shared_ptr<const Buffer>> held;

  uint64_t first() const { return offset / layer->proof.table.chunk_bytes(); }
  uint64_t last() const { return (offset + size - 1) / layer->proof.table.chunk_bytes(); }
};

ChunkLoader::ChunkLoader(DataCache* cache, LoaderOptions options, Counts& counts, OnBad on_bad)
    : cache_(cache), options_(options), counts_(counts), on_bad_(std::move(on_bad)) {
  for (size_t i = 0; i < options_.disk_threads; ++i)
    threads_.emplace_back([this](const std::stop_token& stop) { DiskThread(stop); });
  for (size_t i = 0; i < options_.fetch_threads; ++i)
    threads_.emplace_back([this](const std::stop_token& stop) { FetchThread(stop); });
}

ChunkLoader::~ChunkLoader() {
  for (auto& thread : threads_) thread.request_stop();
  threads_.clear();
  // Layers hold their fetches, which hold them.
  for (const auto& fetch : fetches_) fetch->layer->fetches_.clear();
}

std::shared_ptr<ChunkLoader::Job> ChunkLoader::Read(std::shared_ptr<Layer> layer, uint64_t offset,
                                                    uint32_t size, Done done) {
  auto job = std::make_shared<Job>();
  job->layer = std::move(layer);
  job->offset = offset;
  job->size = size;
  job->done = std::move(done);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
  }
  disk_work_.notify_one();
  return job;
}

bool ChunkLoader::Cancel(const std::shared_ptr<Job>& job) {
  const std::lock_guard lock(job->mutex);
  return std::exchange(job->done, nullptr) != nullptr;
}

void ChunkLoader::Finish(const std::shared_ptr<Job>& job, Result<Pieces> result) {
  Done done;
  {
    const std::lock_guard lock(job->mutex);
    done = std::exchange(job->done, nullptr);
  }
  if (done) done(std::move(result));
}

void ChunkLoader::DiskThread(const std::stop_token& stop) {
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      if (!disk_work_.wait(lock, stop, [&] { return !jobs_.empty(); })) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    Advance(job);
  }
}

// Answers a read or sends it to wait for what is missing.
void ChunkLoader::Advance(const std::shared_ptr<Job>& job) {
  {
    const std::lock_guard lock(job->mutex);
    if (!job->done) return;
  }
  std::optional<Error> error;
  {
    const std::lock_guard lock(mutex_);
    error = job->error;
  }
  if (error) return Finish(job, *std::move(error));
  Pieces pieces;
  std::vector<uint64_t> missing;
  if (Assemble(*job, pieces, missing)) return Finish(job, std::move(pieces));
  pieces.clear();
  WaitFor(job, missing.front(), missing.back());
}

// False: some chunks are not here. Nothing is loaded from disk then, so that reads that wait hold
// no memory.
bool ChunkLoader::Assemble(Job& job, Pieces& pieces, std::vector<uint64_t>& missing) {
  Layer& layer = *job.layer;
  const auto& table = layer.proof.table;
  std::map<uint64_t, std::shared_ptr<const Buffer>> found;
  for (uint64_t chunk = job.first(); chunk <= job.last(); ++chunk) {
    auto buffer = FromMemory(layer, chunk);
    if (buffer == nullptr) {
      const std::lock_guard lock(mutex_);
      if (const auto held = job.held.find(chunk); held != job.held.end()) buffer = held->second;
    }
    if (buffer != nullptr) {
      found[chunk] = std::move(buffer);
    } else if (layer.local_ == nullptr || !cache_->Has(*layer.local_, chunk)) {
      missing.push_back(chunk);
    }
  }
  for (uint64_t chunk = job.first(); chunk <= job.last() && missing.empty(); ++chunk) {
    auto& buffer = found[chunk];
    if (buffer == nullptr) buffer = FromDisk(layer, chunk);
    if (buffer == nullptr) missing.push_back(chunk);
  }
  if (!missing.empty()) return false;
  const uint64_t end = job.offset + job.size;
  for (const auto& [chunk, buffer] : found) {
    const uint64_t start = table.OffsetOf(chunk);
    const uint64_t from = std::max(job.offset, start);
    const uint64_t to = std::min(end, start + buffer->bytes().size());
    pieces.push_back({buffer, buffer->bytes().subspan(from - start, to - from)});
  }
  return true;
}

std::shared_ptr<const Buffer> ChunkLoader::FromMemory(const Layer& layer, uint64_t chunk) {
  const std::lock_guard lock(mutex_);
  const auto found = memory_.find({layer.serial_, chunk});
  if (found == memory_.end()) return nullptr;
  memory_order_.splice(memory_order_.begin(), memory_order_, found->second.place);
  ++counts_.memory_hits;
  return found->second.buffer;
}

std::shared_ptr<const Buffer> ChunkLoader::FromDisk(Layer& layer, uint64_t chunk) {
  auto buffer = std::make_shared<Buffer>(layer.proof.table.SizeOf(chunk));
  const uint64_t read = cache_->Read(*layer.local_, chunk, buffer->bytes());
  if (read == 0 || !layer.proof.table.Matches(chunk, buffer->bytes())) {
    if (read != 0 && cache_->Drop(*layer.local_, chunk, read)) {
      ++counts_.damaged_chunks;
      log::Warn("blobfs.local_chunk_damaged", {{"layer", layer.hex}, {"chunk", chunk}});
    }
    return nullptr;
  }
  ++counts_.disk_hits;
  Remember(layer, chunk, buffer);
  return buffer;
}

void ChunkLoader::Remember(const Layer& layer, uint64_t chunk,
                           std::shared_ptr<const Buffer> buffer) {
  std::vector<std::shared_ptr<const Buffer>> dropped;  // after the lock
  const std::lock_guard lock(mutex_);
  const Key key{layer.serial_, chunk};
  if (memory_.contains(key)) return;
  memory_used_ += buffer->bytes().size();
  memory_order_.push_front(key);
  memory_.emplace(key, Kept{std::move(buffer), memory_order_.begin()});
  while (memory_used_ > options_.memory_bytes && !memory_order_.empty()) {
    const auto oldest = memory_.find(memory_order_.back());
    memory_used_ -= oldest->second.buffer->bytes().size();
    dropped.push_back(std::move(oldest->second.buffer));
    memory_.erase(oldest);
    memory_order_.pop_back();
  }
}

// Joins the fetches that are under way for what is missing and begins those that are not.
void ChunkLoader::WaitFor(const std::shared_ptr<Job>& job, uint64_t first, uint64_t last) {
  Layer& layer = *job->layer;
  const uint64_t most = std::max<uint64_t>(kRunBytes / layer.proof.table.chunk_bytes(), 1);
  const MonoTime now = Clock::System().Mono();
  std::optional<uint64_t> bad;
  {
    const std::lock_guard lock(mutex_);
    ++job->rounds;
    std::set<std::shared_ptr<Fetch>> joined;
    std::shared_ptr<Fetch> open;
    for (uint64_t chunk = first; chunk <= last; ++chunk) {
      if (const auto known = layer.bad_.find(chunk);
          known != layer.bad_.end() && now - known->second < options_.bad_pause)
        bad = chunk;
    }
    for (uint64_t chunk = first; chunk <= last && !bad; ++chunk) {
      if (const auto found = layer.fetches_.find(chunk); found != layer.fetches_.end()) {
        joined.insert(found->second);
        open = nullptr;
        continue;
      }
      if (open == nullptr || open->count == most) {
        open = std::make_shared<Fetch>();
        open->layer = job->layer;
        open->first = chunk;
        fetches_.push_back(open);
        joined.insert(open);
      }
      ++open->count;
      layer.fetches_[chunk] = open;
    }
    for (const auto& fetch : joined) fetch->waiters.push_back(job);
    job->waiting = joined.size();
  }
  if (bad) {
    return Finish(job,
                  Error(Code::kInternal, "layer.corrupt",
                        fmt::format("chunk {} of sha256:{} has a wrong digest", *bad, layer.hex)));
  }
  fetch_work_.notify_all();
}

std::shared_ptr<Layer::Fetch> ChunkLoader::NextFetch() {
  const size_t most = std::max<size_t>(options_.fetch_threads / 2, 1);
  const auto next = std::ranges::find_if(
      fetches_, [&](const auto& fetch) { return fetch->layer->fetching_ < most; });
  if (next == fetches_.end()) return nullptr;
  auto fetch = std::move(*next);
  fetches_.erase(next);
  ++fetch->layer->fetching_;
  return fetch;
}

void ChunkLoader::FetchThread(const std::stop_token& stop) {
  while (true) {
    std::shared_ptr<Fetch> fetch;
    {
      std::unique_lock lock(mutex_);
      if (!fetch_work_.wait(lock, stop, [&] { return (fetch = NextFetch()) != nullptr; })) return;
    }
    Run(fetch);
  }
}

void ChunkLoader::Run(const std::shared_ptr<Fetch>& fetch) {
  Layer& layer = *fetch->layer;
  Load(*fetch);
  std::vector<std::shared_ptr<Job>> ready;
  {
    const std::lock_guard lock(mutex_);
    --layer.fetching_;
    for (uint64_t i = 0; i < fetch->count; ++i) layer.fetches_.erase(fetch->first + i);
    for (const auto& job : fetch->waiters) {
      for (uint64_t i = 0; i < fetch->count; ++i) {
        const uint64_t chunk = fetch->first + i;
        if (chunk < job->first() || chunk > job->last()) continue;
        if (fetch->errors[i] && !job->error) job->error = fetch->errors[i];
        if (fetch->buffers[i] != nullptr && job->rounds > kPatientRounds)
          job->held[chunk] = fetch->buffers[i];
      }
      if (--job->waiting == 0) jobs_.push_back(job);
    }
    fetch->waiters.clear();
  }
  disk_work_.notify_all();
  fetch_work_.notify_all();  // the layer may have another one
  if (layer.local_ == nullptr) return;
  for (uint64_t i = 0; i < fetch->count; ++i) {
    if (fetch->buffers[i] != nullptr)
      cache_->Write(*layer.local_, fetch->first + i, fetch->buffers[i]->bytes());
  }
}

void ChunkLoader::Load(Fetch& fetch) {
  fetch.buffers.assign(fetch.count, nullptr);
  fetch.errors.assign(fetch.count, std::nullopt);
  // Wrong bytes may be the fault of a way that is another one the next time.
  if (LoadChunks(fetch)) return;
  fetch.layer->reader_->Reopen();
  if (LoadChunks(fetch)) return;
  Layer& layer = *fetch.layer;
  for (uint64_t i = 0; i < fetch.count; ++i) {
    if (fetch.buffers[i] != nullptr || fetch.errors[i]) continue;
    const uint64_t chunk = fetch.first + i;
    bool first = false;
    {
      const std::lock_guard lock(mutex_);
      first = layer.bad_.insert_or_assign(chunk, Clock::System().Mono()).second;
    }
    ++counts_.wrong_digests;
    if (first) {
      log::Error("blobfs.wrong_digest", {{"layer", layer.hex}, {"chunk", chunk}});
      on_bad_(layer.hex, chunk);
    }
    fetch.errors[i] =
        Error(Code::kInternal, "layer.corrupt",
              fmt::format("chunk {} of sha256:{} has a wrong digest", chunk, layer.hex));
  }
}

// False: some have a wrong digest; they have neither buffer nor error.
bool ChunkLoader::LoadChunks(Fetch& fetch) {
  const auto& table = fetch.layer->proof.table;
  uint64_t size = 0;
  for (uint64_t i = 0; i < fetch.count; ++i) size += table.SizeOf(fetch.first + i);
  Buffer run(size);
  ++counts_.fetches;
  auto read = fetch.layer->reader_->ReadAt(table.OffsetOf(fetch.first), run.bytes());
  if (!read.ok()) {
    ++counts_.fetch_failures;
    log::Warn("blobfs.fetch_failed", {{"layer", fetch.layer->hex}, {"error", read.error()}});
    for (uint64_t i = 0; i < fetch.count; ++i) {
      if (fetch.buffers[i] == nullptr) fetch.errors[i] = read.error();
    }
    return true;
  }
  counts_.fetched_bytes += size;
  bool all = true;
  for (uint64_t i = 0; i < fetch.count; ++i) {
    if (fetch.buffers[i] != nullptr) continue;
    const uint64_t chunk = fetch.first + i;
    const auto bytes = run.bytes().subspan(table.OffsetOf(chunk) - table.OffsetOf(fetch.first),
                                           table.SizeOf(chunk));
    if (!table.Matches(chunk, bytes)) {
      all = false;
      continue;
    }
    auto buffer = std::make_shared<Buffer>(bytes.size());
    std::ranges::copy(bytes, buffer->bytes().begin());
    fetch.buffers[i] = buffer;
    Remember(*fetch.layer, chunk, std::move(buffer));
    const std::lock_guard lock(mutex_);
    fetch.layer->bad_.erase(chunk);
  }
  return all;
}

std::vector<uint64_t> ChunkLoader::Recheck(const std::shared_ptr<Layer>& layer) {
  const auto bad = [&] {
    std::vector<uint64_t> chunks;
    const std::lock_guard lock(mutex_);
    for (const auto& [chunk, since] : layer->bad_) chunks.push_back(chunk);
    return chunks;
  };
  auto chunks = bad();
  while (!chunks.empty()) {
    const uint64_t chunk = chunks.front();
    {
      const std::lock_guard lock(mutex_);
      layer->bad_[chunk] = MonoTime();  // long ago: it may be fetched now
    }
    auto answered = std::make_shared<std::promise<bool>>();
    auto answer = answered->get_future();
    Read(layer, layer->proof.table.OffsetOf(chunk), 1,
         [answered](const Result<Pieces>& pieces) { answered->set_value(pieces.ok()); });
    if (!answer.get()) return bad();
    chunks = bad();
    // Read from a copy that was right all the time: then it is not the source that healed.
    if (!chunks.empty() && chunks.front() == chunk) {
      const std::lock_guard lock(mutex_);
      layer->bad_.erase(chunk);
      chunks.erase(chunks.begin());
    }
  }
  return chunks;
}

}  // namespace dsec::blobfs
