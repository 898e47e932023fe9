// Gradient of GroupNorm, and of the ReLU before it, with dy and x read once: a block holds its loaded data in
// shared memory until the sums of their norm group are known.
//
// A chunk is `length` positions of one channel, and `units` chunks are a norm group of one batch item. Blocks
// take chunks one by one from an atomic counter (take_turn), norm groups from the last to the first, and load
// each chunk into a stage of a ring in shared memory:
//
//   producer    takes a turn when a stage is about to be empty, and issues bulk copies of dy and x
//   consumers   sum a chunk when it has arrived (first pass), and compute dz when its coefficients are known
//               (second pass); first passes go first, because other blocks wait for their sums
//   speaker     adds the consumers' sums of a chunk and writes them to global memory for all blocks
//   finder      waits for all sums of the oldest chunk's norm group, and gives slope and constant to the
//               consumers; it prefetches the sums for the next chunk to hide the latency of memory
//
// When there is nothing left to load, the producer warps sum the gradients of the norm's parameters.
//
// A first pass waits for nothing but memory, so that a norm group's sums arrive once all of its chunks have
// been taken. Where so few blocks run that their rings are full before all chunks are taken, the finder
// helps: it takes the remaining chunks, sums them by itself, and reads them again for the second pass.
#pragma once

#include "norm_passes.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct NormOnce {
  using Scalar = typename C::Scalar;
  using Gradient = typename C::Gradient;
  using Pair = Vector<float, 2>;

  static constexpr int kVector = C::kVector, kConsumers = C::kConsumers;
  static constexpr int kMostStages = 16;
  static constexpr int kStep = kConsumers * 32 * kVector;  // positions from a thread's vector to its next
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static_assert(C::kThreads == 32 * (3 + kConsumers), "a producer, a speaker, a finder");
  static_assert(!C::kChannelsLast && sizeof(typename C::Acc) == 4, "chunks of a channel, summed as floats");

  // A chunk of a norm group, where norm groups are counted over all batch items.
  struct Chunk {
    int n, group, first;  // batch item, norm group and its first channel
    int unit, channel, slot;
    int items;  // positions; 0: there are no more chunks
    long long start;

    __device__ __forceinline__ static Chunk of(const Args& args, unsigned turn) {
      const int slots = args.strips.slots, units = args.per_group * slots;
      Chunk chunk{};
      chunk.group = args.strips.batch * args.groups - 1 - static_cast<int>(turn / units);
      if (chunk.group < 0) return chunk;
      chunk.n = chunk.group / args.groups;
      chunk.first = chunk.group % args.groups * args.per_group;
      chunk.unit = static_cast<int>(turn % units);
      chunk.channel = chunk.first + chunk.unit / slots;
      chunk.slot = chunk.unit % slots;
      const long long before = static_cast<long long>(chunk.slot) * args.strips.length;
      const long long left = args.strips.volume - before;
      chunk.items = static_cast<int>(left < args.strips.length ? left : args.strips.length);
      const long long row = static_cast<long long>(chunk.n) * args.strips.channels + chunk.channel;
      chunk.start = row * args.strips.volume + before;
      return chunk;
    }
    // Returns the turn of the first chunk of this chunk's norm group.
    __device__ __forceinline__ unsigned begin(const Args& args) const {
      return static_cast<unsigned>(args.strips.batch * args.groups - 1 - group) * args.per_group *
             args.strips.slots;
    }
  };

  struct Shared {
    unsigned long long loaded[kMostStages], summed[kMostStages], known[kMostStages], empty[kMostStages];
    Chunk chunk[kMostStages];
    float mean[kMostStages];
    Vector<float, 4> how[kMostStages];  // mean, scale, slope, constant
    Pair parts[kMostStages][kConsumers];
    int issued;  // chunks that the producer has begun to load
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;
  static_assert(kSharedBytes <= C::kTableBytes, "the planner leaves room for it");

  const Args& args;
  Shared& shared;
  unsigned char* data;
  int lane;

  __device__ __forceinline__ static unsigned at(const unsigned long long& barrier) {
    return ptx::shared_address(&barrier);
  }
  __device__ __forceinline__ int units() const { return args.per_group * args.strips.slots; }
  __device__ __forceinline__ const Gradient* dy_of(int stage) const {
    constexpr int kBoth = sizeof(Gradient) + sizeof(Scalar);
    return reinterpret_cast<const Gradient*>(data +
                                             static_cast<unsigned>(stage) * args.strips.length * kBoth);
  }
  __device__ __forceinline__ const Scalar* x_of(int stage) const {
    return reinterpret_cast<const Scalar*>(dy_of(stage) + args.strips.length);
  }

  // Runs the producer, which is one thread.
  __device__ __forceinline__ void produce() {
    Ring ring;
    for (int issued = 0;; ++issued, ring.advance(args.stages)) {
      const int stage = ring.index;
      // A stage whose coefficients are known becomes empty without further help, so that the turn can be
      // taken now.
      if (issued >= args.stages) ptx::barrier_wait(at(shared.known[stage]), ring.parity ^ 1u);
      const Chunk chunk = Chunk::of(args, ptx::take_turn(static_cast<unsigned*>(args.turns)));
      if (issued >= args.stages) ptx::barrier_wait(at(shared.empty[stage]), ring.parity ^ 1u);
      shared.chunk[stage] = chunk;
      load(chunk, stage);
      if (chunk.items == 0) return;
      ptx::write_shared(&shared.issued, issued + 1);
    }
  }
  __device__ __forceinline__ void load(const Chunk& chunk, int stage) const {
    const unsigned items = static_cast<unsigned>(chunk.items), loaded = at(shared.loaded[stage]);
    ptx::barrier_arrive_expect(loaded, items * (sizeof(Gradient) + sizeof(Scalar)));
    if (items > 0) {
      ptx::bulk_copy(ptx::shared_address(dy_of(stage)), static_cast<const Gradient*>(args.dy) + chunk.start,
                     items * sizeof(Gradient), loaded);
      ptx::bulk_copy(ptx::shared_address(x_of(stage)), static_cast<const Scalar*>(args.x) + chunk.start,
                     items * sizeof(Scalar), loaded);
      ptx::copy_words<1>(&shared.mean[stage], static_cast<const float*>(args.statistics) + chunk.group, true);
    }
    ptx::copy_arrive(loaded);
  }

  // Applies `body` to consumer `warp`'s part of a chunk. Two vectors are loaded before they are used.
  template <class Body>
  __device__ __forceinline__ void sweep(Body& body, int items, int warp) const {
    int i = (32 * warp + lane) * kVector;
    for (; i + kStep < items; i += 2 * kStep) {
      const auto first = body.template load<kVector>(i), second = body.template load<kVector>(i + kStep);
      body.template use<kVector>(i, first);
      body.template use<kVector>(i + kStep, second);
    }
    if (i < items) body.template use<kVector>(i, body.template load<kVector>(i));
  }

  // Returns consumer `warp`'s share of a chunk's sums: of dy, and of dy * (x - mean).
  __device__ __forceinline__ Pair add_up(const Gradient* dy, const Scalar* x, int items, float mean,
                                         int warp) const {
    NormSums<C> body{dy, x, {mean}};
    sweep(body, items, warp);
    return {warp_sum(body.sums[0][0]), warp_sum(body.sums[0][1])};
  }

  // Computes dz for consumer `warp`'s part of a chunk.
  __device__ __forceinline__ void finish(const Gradient* dy, const Scalar* x, const Chunk& chunk,
                                         const Vector<float, 4>& how, int warp) const {
    if (args.dz == nullptr) return;
    NormGrad<C, false, true> body{dy,          x,           static_cast<Scalar*>(args.dz) + chunk.start,
                                  {how.at[0]}, {how.at[1]}, {how.at[2]},
                                  {how.at[3]}};
    sweep(body, chunk.items, warp);
    if (args.bias_sums == nullptr) return;
    const float sum = warp_sum(body.sums[0][0]);
    const long long part =
        (static_cast<long long>(chunk.n) * args.strips.slots + chunk.slot) * kConsumers + warp;
    if (lane == 0) static_cast<float*>(args.bias_sums)[part * args.strips.channels + chunk.channel] = sum;
  }

  __device__ __forceinline__ void consume(int warp) {
    Ring first, second;  // stages of the next first pass and of the next second pass
    int begun = 0;       // chunks after their first and before their second pass
    bool more = true;
    while (more || begun > 0) {
      const unsigned loaded = at(shared.loaded[first.index]), known = at(shared.known[second.index]);
      bool add = more;
      if (more && begun > 0) {
        add = __shfl_sync(kAll, ptx::barrier_wait_either(loaded, first.parity, known, second.parity), 0);
      }
      if (add) {
        const int stage = first.index;
        ptx::barrier_wait(loaded, first.parity);
        const int items = shared.chunk[stage].items;
        more = items > 0;
        if (!more) continue;
        const Pair sums = add_up(dy_of(stage), x_of(stage), items, shared.mean[stage], warp);
        if (lane == 0) {
          shared.parts[stage][warp] = sums;
          ptx::barrier_arrive(at(shared.summed[stage]));
        }
        first.advance(args.stages);
        ++begun;
      } else {
        const int stage = second.index;
        ptx::barrier_wait(known, second.parity);
        finish(dy_of(stage), x_of(stage), shared.chunk[stage], shared.how[stage], warp);
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(at(shared.empty[stage]));
        second.advance(args.stages);
        --begun;
      }
    }
  }

  __device__ __forceinline__ Pair* sums_of(const Chunk& chunk) const {
    return static_cast<Pair*>(args.sums) + static_cast<long long>(chunk.group) * units() + chunk.unit;
  }

  // Runs the speaker, which is one thread.
  __device__ __forceinline__ void speak() {
    for (Ring ring;; ring.advance(args.stages)) {
      const int stage = ring.index;
      ptx::barrier_wait(at(shared.loaded[stage]), ring.parity);
      if (shared.chunk[stage].items == 0) return;
      ptx::barrier_wait(at(shared.summed[stage]), ring.parity);
      Pair all{};
#pragma unroll
      for (int warp = 0; warp < kConsumers; ++warp) add(all, shared.parts[stage][warp]);
      write_pair<true>(sums_of(shared.chunk[stage]), all);
    }
  }
  __device__ __forceinline__ static void add(Pair& all, const Pair& part) {
    all.at[0] += part.at[0];
    all.at[1] += part.at[1];
  }

  __device__ __forceinline__ float weight_of(int channel) const {
    return args.weight ? widen<float>(static_cast<const typename C::Parameter*>(args.weight)[channel]) : 1.0f;
  }

  // The coefficients that a norm group's dz is computed with.
  struct Found {
    int group = -1;
    float mean, rstd, slope, constant;
    unsigned helped;  // bit i: the finder has taken the chunk of unit 32 * lane + i
  };

  // Prefetched data of the finder for a chunk and its norm group: statistics, and the sums and weights of the
  // group's first kUnitsSeen units, kSeen units per lane. The loads are in flight while the previous chunk is
  // processed.
  static constexpr int kSeen = 4, kUnitsSeen = 32 * kSeen;
  struct Seen {
    Chunk chunk;
    float mean, rstd, weight;
    unsigned long long words[kSeen];
    float weights[kSeen];
  };
  // Loads `seen` for the chunk of a stage. `channels` has the channels of the lane's units, counted from the
  // norm group's first channel.
  __device__ __forceinline__ void look(Seen& seen, int stage, const int (&channels)[kSeen]) const {
    seen.chunk = shared.chunk[stage];
    if (seen.chunk.items == 0) return;
    look_at_units(seen, 0, channels);
    const float* statistics = static_cast<const float*>(args.statistics) + seen.chunk.group;
    seen.mean = statistics[0];
    seen.rstd = statistics[args.strips.batch * args.groups];
    seen.weight = weight_of(seen.chunk.channel);
  }
  __device__ __forceinline__ void look_at_units(Seen& seen, int begin, const int (&channels)[kSeen]) const {
    const Pair* sums = sums_of(seen.chunk) - seen.chunk.unit + begin + lane;
#pragma unroll
    for (int i = 0; i < kSeen; ++i) {
      const bool exists = begin + 32 * i + lane < units();
      seen.words[i] = exists ? ptx::look_at_word(sums + 32 * i) : 0;
      seen.weights[i] = exists ? weight_of(seen.chunk.first + channels[i]) : 0.0f;
    }
  }
  __device__ __forceinline__ void channels_of(int begin, int (&channels)[kSeen]) const {
#pragma unroll
    for (int i = 0; i < kSeen; ++i) channels[i] = (begin + 32 * i + lane) / args.strips.slots;
  }

  __device__ __forceinline__ void find() const {
    const double share = 1.0 / (static_cast<double>(args.strips.volume) * args.per_group);
    int channels[kSeen];
    channels_of(0, channels);
    Found found;
    Seen seen;
    Ring ring;
    ptx::barrier_wait(at(shared.loaded[ring.index]), ring.parity);
    look(seen, ring.index, channels);
    for (int index = 0; seen.chunk.items > 0; ++index) {
      const Chunk chunk = seen.chunk;
      const float weight = seen.weight;
      const bool fresh = chunk.group != found.group;
      double sums[2] = {0, 0};
      if (fresh) {
        found = {chunk.group, seen.mean, seen.rstd, 0, 0, 0};
        add_group(seen, sums, found.helped, index);
      }
      const int stage = ring.index;
      ring.advance(args.stages);
      const unsigned next = at(shared.loaded[ring.index]);
      const bool ahead = __shfl_sync(kAll, ptx::barrier_complete(next, ring.parity), 0);
      if (ahead) look(seen, ring.index, channels);
      if (fresh) {
        const double rstd = found.rstd;
        found.slope = static_cast<float>(-rstd * rstd * rstd * share * warp_sum(sums[1]));
        found.constant = static_cast<float>(-rstd * share * warp_sum(sums[0]));
      }
      if (lane == 0) {
        shared.how[stage] = {found.mean, found.rstd * weight, found.slope, found.constant};
        ptx::barrier_arrive(at(shared.known[stage]));
      }
      if (fresh && __any_sync(kAll, found.helped != 0)) finish_helped(found, chunk.begin(args));
      if (!ahead) {
        ptx::barrier_wait(next, ring.parity);
        look(seen, ring.index, channels);
      }
    }
  }

  // Adds the sums of a norm group's chunks as they arrive, in an order that depends on their number only.
  // `index` counts this block's chunks before the oldest one of the group.
  __device__ __forceinline__ void add_group(Seen& seen, double (&sums)[2], unsigned& helped,
                                            int index) const {
    bool taken = false;  // whether all chunks are known to be taken
    for (int begin = 0; begin < units(); begin += kUnitsSeen) {
      if (begin > 0) {
        int channels[kSeen];
        channels_of(begin, channels);
        look_at_units(seen, begin, channels);
      }
      const Pair* from = sums_of(seen.chunk) - seen.chunk.unit + begin + lane;
      while (true) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < kSeen; ++i) missing = missing || seen.words[i] == ~0ull;
        if (!__any_sync(kAll, missing)) break;
#pragma unroll
        for (int i = 0; i < kSeen; ++i) {
          if (seen.words[i] == ~0ull) seen.words[i] = ptx::look_at_word(from + 32 * i);
        }
        if (!taken) taken = help(seen.chunk.begin(args), index, helped);
      }
#pragma unroll
      for (int i = 0; i < kSeen; ++i) {
        const double weight = seen.weights[i];
        sums[0] += weight * ptx::bits_to_float(static_cast<unsigned>(seen.words[i]));
        sums[1] += weight * ptx::bits_to_float(static_cast<unsigned>(seen.words[i] >> 32));
      }
    }
  }

  // Returns whether all chunks of a norm group have been taken. If not, and the ring of this block is full,
  // this warp takes one and sums it. `begin` is the turn of the group's first chunk; `index` counts this
  // block's chunks before the oldest one of the group.
  __device__ __forceinline__ bool help(unsigned begin, int index, unsigned& helped) const {
    const unsigned end = begin + units();
    unsigned* turns = static_cast<unsigned*>(args.turns);
    unsigned taken = end;
    if (lane == 0 && ptx::turns_taken(turns) < end) {
      // The producer takes chunks as long as the ring has room.
      const bool full = ptx::read_shared(&shared.issued) == index + args.stages;
      taken = full ? ptx::take_turn_below(turns, end) : begin - 1;
    }
    taken = __shfl_sync(kAll, taken, 0);
    if (taken == end) return true;
    if (taken == begin - 1) return false;
    const Chunk chunk = Chunk::of(args, taken);
    const Gradient* dy = static_cast<const Gradient*>(args.dy) + chunk.start;
    const Scalar* x = static_cast<const Scalar*>(args.x) + chunk.start;
    const float mean = static_cast<const float*>(args.statistics)[chunk.group];
    Pair all{};
    for (int warp = 0; warp < kConsumers; ++warp) add(all, add_up(dy, x, chunk.items, mean, warp));
    if (lane == 0) write_pair<true>(sums_of(chunk), all);
    if (chunk.unit / 32 == lane) helped |= 1u << chunk.unit % 32;
    return false;
  }

  // Computes dz of the chunks that the finder has taken. `begin` is the turn of the norm group's first chunk.
  __device__ __forceinline__ void finish_helped(const Found& found, unsigned begin) const {
    for (int owner = 0; 32 * owner < units(); ++owner) {
      const unsigned bits = __shfl_sync(kAll, found.helped, owner);
      for (int bit = 0; bit < 32; ++bit) {
        if (!(bits >> bit & 1u)) continue;
        const Chunk chunk = Chunk::of(args, begin + 32 * owner + bit);
        const Vector<float, 4> way{found.mean, found.rstd * weight_of(chunk.channel), found.slope,
                                   found.constant};
        for (int warp = 0; warp < kConsumers; ++warp) {
          finish(static_cast<const Gradient*>(args.dy) + chunk.start,
                 static_cast<const Scalar*>(args.x) + chunk.start, chunk, way, warp);
        }
      }
    }
  }

  // Sums the gradients of the norm's parameters, for each channel over all batch items in a fixed order.
  // Block b has channels b, b + gridDim.x and so on, and sums them when there is nothing left to load.
  __device__ __forceinline__ void leave_parameters() const {
    using Parameter = typename C::Parameter;
    if (args.dparameters == nullptr) return;
    const int channels = args.strips.channels, slots = args.strips.slots, parts = args.strips.batch * slots;
    Parameter* to = static_cast<Parameter*>(args.dparameters);
    const float* rstds = static_cast<const float*>(args.statistics) + args.strips.batch * args.groups;
    for (int channel = static_cast<int>(blockIdx.x); channel < channels; channel += gridDim.x) {
      double all[2] = {0, 0};
      for (int part = lane; part < parts; part += 32) {
        const int n = part / slots;
        const Pair* sums = static_cast<const Pair*>(args.sums) + static_cast<long long>(n) * channels * slots;
        const Pair pair = read_pair<true>(sums + channel * slots + part % slots);
        all[0] += pair.at[0];
        all[1] += static_cast<double>(rstds[n * args.groups + channel / args.per_group]) * pair.at[1];
      }
      const double dweight = warp_sum(all[1]), dbias = warp_sum(all[0]);
      if (lane != 0) continue;
      to[channel] = Narrow<Parameter>::from(static_cast<float>(dweight));
      to[channels + channel] = Narrow<Parameter>::from(static_cast<float>(dbias));
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Kernel = NormOnce<C>;
  using Shared = typename Kernel::Shared;
  Shared& shared = *dynamic_shared<Shared>();
  // The shuffle tells the compiler that all lanes of a warp have one role.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    shared.issued = 0;
    for (int i = 0; i < args.stages; ++i) {
      ptx::barrier_init(Kernel::at(shared.loaded[i]), 2);
      ptx::barrier_init(Kernel::at(shared.summed[i]), Kernel::kConsumers);
      ptx::barrier_init(Kernel::at(shared.known[i]), 1);
      ptx::barrier_init(Kernel::at(shared.empty[i]), Kernel::kConsumers);
    }
    ptx::fence_barrier_init();
  }
  ptx::wait_for_previous_launch();
  __syncthreads();
  Kernel kernel{args, shared, dynamic_shared<unsigned char>() + C::kTableBytes, lane};
  if (warp == 0) {
    if (lane == 0) kernel.produce();
    __syncwarp();
    kernel.leave_parameters();
  } else if (warp == 1) {
    if (lane == 0) kernel.speak();
  } else if (warp == 2) {
    kernel.find();
  } else {
    kernel.consume(warp - 3);
  }
}

}  // namespace tconv3d
