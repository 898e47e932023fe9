// Transposed 3D convolution on Hopper's tensor cores (sm_90a), forward pass and input gradient: one halo tile
// feeds all phases.
//
// The algorithm, for one tile of positions q and one tile of output channels:
//
//   for each chunk of input channels:
//     load the tile's input with its halo into shared memory, once: a row of channels per position
//     for each shift (a displacement of the input that some phases need):
//       accumulators of the phases it feeds  +=  rows of the tile, displaced by the shift  x  panel of the
//       shift
//   write stride*q + phase for all phases
//
// A displacement costs nothing: tensor cores read the rows in place, through a descriptor moved by whole
// rows. A slab is 64 positions, the rows of one matrix instruction: 8 groups of 8 rows, any one pitch apart.
// A slab is therefore 8 neighbours along w on each of 8 lines, or 64 rows in sequence. The shape of slabs and
// the size of the tile are run-time numbers: a new volume never recompiles.
//
// Marching (kMarch): the tile is flat, and its block walks along depth. The phases along depth become a
// window of output planes: input plane i feeds output planes i*stride - padding + tap*dilation through one
// wide instruction per in-plane shift, after which the window's first `stride` planes are complete and the
// window moves. This makes wide instructions out of few output channels, and reads each input plane once. A
// marching tile may be a run: the lines of all planes of one depth (one plane per batch item) form one
// sequence of rows, and a tile is a fixed number of rows in sequence, wherever lines end. Then no slab is
// partly empty because a line is short.
//
// Input gradient: the sources are the phase planes of dy, a position has one field, and the loops are
//
//   for each source, for each chunk: load the halo; for each of the source's shifts: the products
//
// Portions (Division::kBlocks) are split-K for small volumes, which have fewer tiles than the GPU has
// multiprocessors. Blocks divide the chunks of a tile, and each stores partial sums, in the order of y, for
// the launch that adds them up (reduce_gradients.cuh).
//
// Shares (Division::kLastTiles) are split-K for the last wave only, because tiles seldom fill whole waves of
// all multiprocessors. Every block first takes the same number of whole tiles; the chunks of the remaining
// tiles are divided into shares of equal cost. A block whose share covers only a piece of a tile stores its
// partial sums for the launch that adds them up and writes the outputs (halo_add.cuh).
//
// Roles in a block: producers (the first warpgroups) fill a ring of halo stages; one producer warp fills a
// ring of weight panels with the copy engine or, if all panels of the column tile fit (Weights::kResident),
// one producer thread loads them once; consumers multiply and store. Blocks are persistent: while consumers
// store a tile, producers load the next.
//
// The terms field, unit, panel, pattern, chunk and column tile are explained in halo_layout.cuh. This file
// has the consumers' loops. The other files, from the outside in:
//
// - halo_choices.cuh: the four questions that a build answers
// - halo_tile.cuh: the part of the problem that a block works on
// - halo_shared.cuh: the layout of shared memory
// - halo_loaders.cuh: the producers' loop, with halo_positions.cuh, halo_vectors.cuh and halo_copies.cuh for
//   the loads of one lane
// - halo_panels.cuh: loading of weights
// - halo_lines.cuh: builds that load, multiply and store the input as it lies in memory
// - halo_registers.cuh: builds that multiply rows of channels out of registers
// - halo_consumer.cuh: a consumer's state, with its positions in the rings
// - halo_divided.cuh: two consumers for one tile
// - halo_pieces.cuh and halo_add.cuh: tiles whose chunks several blocks divide
// - halo_products.cuh: matrix instructions
// - halo_sums.cuh: accumulators
// - halo_stores.cuh, halo_images.cuh, halo_words.cuh and halo_long_runs.cuh: stores of outputs
// - halo_moments.cuh: moments of the outputs for a norm layer
// - halo_channels.cuh: softmax and reductions over the channels of a position
#pragma once

#include "halo_add.cuh"
#include "halo_channels.cuh"
#include "halo_divided.cuh"
#include "halo_epilogue.cuh"
#include "halo_images.cuh"
#include "halo_lines.cuh"
#include "halo_loaders.cuh"
#include "halo_long_runs.cuh"
#include "halo_moments.cuh"
#include "halo_panels.cuh"
#include "halo_products.cuh"
#include "halo_registers.cuh"

namespace tconv3d {

template <class Config>
struct Halo {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;
  using Consumer = HaloConsumer<Config>;
  using Place = typename Tile::Place;
  using Slab = typename Tile::Slab;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Products = HaloProducts<Config>;
  using Stores = HaloStores<Config>;
  using Images = HaloImages<Config>;
  using Lines = HaloLines<Config>;
  using LongRuns = HaloLongRuns<Config>;
  using AllMoments = HaloMoments<Config>;
  using Finishing = HaloEpilogue<Config>;
  static constexpr bool kStrict = Config::kHalves == 2;
  // The loop over shifts is unrolled where stores are short: this saves 1 to 4% of the time on an H200, and
  // costs time in other builds.
  static constexpr bool kShort =
      Choices::kCopiesRows && Config::kWeights == Weights::kResident && !Config::kMarch;
  static constexpr int kUnrolled =
      Config::kOutput == Output::kImages || kShort ? 16 : Config::kUnrolledShifts;
  // Whether products with planes above or below the input, which are all zero, are skipped. Builds with few
  // such products do not test for them.
  static constexpr bool kSkips =
      Config::kDivision == Division::kLastTiles ||
      (Choices::kCopiesRows && Config::kWeights != Weights::kResident && !Config::kMarch);

  // Returns the slabs for which a shift along d reads planes inside the input, as a mask: bit m stands for
  // slab m.
  static __device__ __forceinline__ unsigned inside_slabs(const Args& args, const Consumer& me,
                                                          const Slab (&slabs)[Config::kSlabs], int source,
                                                          int shift) {
    unsigned which = 0;
    // Origins are indexed by variant or by source: a build has several variants or several sources, never
    // both.
    const int first = me.depth + Config::kOrigin(me.variant + source, 0) + shift;
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
      const int d = (first + slabs[m].sheet) * Config::kReadStepD + Config::kReadPhase(source, 0);
      if (!args.flat_slabs || Tile::inside(d, args.input.d)) which |= 1u << m;
    }
    return which;
  }

  // Returns the address of the panel of a pattern's shift. Resident panels are already loaded; streamed
  // panels are waited for.
  template <int kPattern>
  static __device__ __forceinline__ unsigned panel_of(const Consumer& me, int source, int chunk, int shift) {
    if constexpr (Config::kWeights == Weights::kResident) {
      return me.shared.panels() + Layout::chunk_start(source, chunk) +
             Layout::rows_before(source, kPattern) * Layout::kPartBytes +
             shift * Layout::panel_bytes(kPattern);
    } else {
      const unsigned panel = me.shared.slot(me.slots.index);
      ptx::barrier_wait(me.shared.slot_full(me.slots.index), me.slots.parity);
      return panel;
    }
  }

  // Adds the shifts of a pattern to the totals in strict float32, kPanelsAtOnce shifts at a time.
  template <int kPattern, int kSteps>
  static __device__ __forceinline__ void multiply_shifts(const Args& args, Consumer& me, Sums& totals,
                                                         Sums& sums,
                                                         const unsigned long long (&a)[Config::kSlabs],
                                                         int source, int chunk, int first_shift,
                                                         int last_shift) {
    constexpr int kPanels = Config::kPanelsAtOnce;
    const int line = args.halo.w * args.items, sheet = args.halo.h * line;
    int count;
    for (int shift = first_shift; shift < last_shift; shift += count) {
      count = 1;
      if constexpr (Config::kDivision == Division::kConsumers) {
        if (!HaloDivided<Config>::own_panel(me)) continue;
      }
      if (last_shift - shift >= kPanels) count = kPanels;
      unsigned long long b[kPanels];
      unsigned displacement[kPanels], slots[kPanels];
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        if (i >= count) break;
        const unsigned panel = panel_of<kPattern>(me, source, chunk, shift + i - first_shift);
        if constexpr (Config::kWeights != Weights::kResident) {
          slots[i] = me.slots.index;
          me.slots.advance();
        }
        const int entry = Layout::shift_entry(me.variant, shift + i);
        const int rows = Config::kShift(entry, 0) * sheet + Config::kShift(entry, 1) * line +
                         Config::kShift(entry, 2) * args.near;
        b[i] = ptx::matrix_descriptor<Layout::kPartBytes>(panel, 8 * Layout::kPartBytes);
        displacement[i] = rows * Config::kRowBytes + Config::kShift(entry, 3) * Layout::kPartBytes;
      }
      ptx::matrix_fence();
      if (count == kPanels) {
        Products::template multiply_halves<kPattern, kSteps, kPanels>(sums, a, b, displacement);
        ptx::matrix_commit();
      } else {
        Products::template multiply_halves<kPattern, kSteps, 1>(sums, a, b, displacement);
        ptx::matrix_commit();
      }
      ptx::matrix_wait<0>();
      me.release();
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        if (i >= count) break;
        me.announce_lead();
        if constexpr (Config::kWeights != Weights::kResident) {
          me.finished.slot = slots[i];
          me.release();
        }
      }
      Accumulators::pin(sums);
      Products::template add_to_totals<kPattern, kSteps>(totals, sums, kPanels == 1 ? 1 : count);
    }
  }

  // Adds the chunks from `first` to before `end` of a source to the sums; each chunk has kSteps steps of K.
  // The products of the last panel may still be in flight on return. Strict float32 adds to the totals, which
  // are separate registers.
  template <int kSteps>
  static __device__ __forceinline__ void multiply_chunks(const Args& args, Consumer& me, Sums& totals,
                                                         Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                         int source, int first, int end, bool last_pass) {
    const unsigned group_bytes = args.group_rows * Config::kRowBytes;
    const int line = args.halo.w * args.items;
    const int sheet = Config::kDivision == Division::kLastTiles ? args.sheet_rows : args.halo.h * line;
    typename Tile::Shifts own[Config::kPatterns];
    if constexpr (Config::kDivision == Division::kLastTiles) {
      static_for<Config::kPatterns>(
          [&](auto p) { own[p] = Tile::Shifts::of(args, me.depth, me.depths, me.variant, source, p); });
    }
    for (int chunk = first; chunk < end; ++chunk, me.stages.advance()) {
      ptx::barrier_wait(me.shared.stage_full(me.stages.index), me.stages.parity);
      // Asynchronous copies that arrive at the barrier by themselves have no thread that fences them for
      // tensor cores.
      if constexpr (Shared::kCopiesArrive) ptx::fence_async_proxy();
      const unsigned stage = me.shared.stage(me.stages.index);
      unsigned long long a[Config::kSlabs];
#pragma unroll
      for (int m = 0; m < Config::kSlabs; ++m) {
        a[m] =
            ptx::matrix_descriptor<Config::kRowBytes>(stage + slabs[m].row * Config::kRowBytes, group_bytes);
      }
      static_for<Config::kPatterns>([&](auto p) {
        constexpr int kPattern = decltype(p)::value;
        const int first_shift = Layout::first_shift(source, kPattern);
        const int last_shift = Config::kDivision == Division::kLastTiles
                                   ? own[kPattern].end
                                   : first_shift + Layout::own_shifts(me.variant, source, kPattern);
        if constexpr (kStrict) {
          multiply_shifts<kPattern, kSteps>(args, me, totals, sums, a, source, chunk, first_shift,
                                            last_shift);
          return;
        }
#pragma unroll kUnrolled
        for (int shift = Config::kDivision == Division::kLastTiles ? own[kPattern].first : first_shift;
             shift < last_shift; ++shift) {
          if constexpr (Config::kDivision == Division::kConsumers) {
            if (!HaloDivided<Config>::own_panel(me)) continue;
          }
          const unsigned panel = panel_of<kPattern>(me, source, chunk, shift - first_shift);
          const int entry = Layout::shift_entry(me.variant, shift);
          const int rows = Config::kShift(entry, 0) * sheet + Config::kShift(entry, 1) * line +
                           Config::kShift(entry, 2) * args.near;
          if constexpr (!kSkips) ptx::matrix_fence();
          const auto b = ptx::matrix_descriptor<Layout::kPartBytes>(panel, 8 * Layout::kPartBytes);
          const unsigned displacement =
              rows * Config::kRowBytes + Config::kShift(entry, 3) * Layout::kPartBytes;
          if constexpr (kSkips) {
            const unsigned which = inside_slabs(args, me, slabs, source, Config::kShift(entry, 0));
            Products::template multiply_slabs<kPattern, kSteps>(sums, a, b, displacement, which);
          } else {
            Products::template multiply_panel<kPattern, kSteps>(sums, a, b, displacement);
          }
          if constexpr (!kSkips) ptx::matrix_commit();
          ptx::matrix_wait<1>();
          me.release();
          me.announce_lead();
          if constexpr (Config::kWeights != Weights::kResident) {
            me.finished.slot = me.slots.index;
            me.slots.advance();
          }
        }
      });
      if (last_pass) me.finished.stage = me.stages.index;
      if constexpr (Config::kDivision == Division::kLastTiles) me.limit_lead();
      if constexpr (Config::kDivision == Division::kConsumers) {
        // A consumer that divides K may have no panel in the next chunk, so it releases the stage here.
        ptx::matrix_wait<0>();
        me.release();
      }
    }
  }

  // Adds all chunks of the tile (when marching, of the plane) to the totals.
  static __device__ __forceinline__ void multiply(const Args& args, Consumer& me, Sums& totals,
                                                  const Slab (&slabs)[Config::kSlabs], const Place& at,
                                                  bool last_pass) {
    if constexpr (kStrict) {
      Sums sums;
#pragma unroll
      for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
        for (int i = 0; i < Accumulators::kSums; ++i) sums[m][i] = Accumulators::nothing(args);
      }
      multiply_sources(args, me, totals, sums, slabs, at, last_pass);
    } else {
      multiply_sources(args, me, totals, totals, slabs, at, last_pass);
    }
  }
  static __device__ __forceinline__ void multiply_sources(const Args& args, Consumer& me, Sums& totals,
                                                          Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                          const Place& at, bool last_pass) {
    constexpr int kFull = Layout::kLastSteps == Layout::kPartSteps ? Layout::kChunks : Layout::kChunks - 1;
    Accumulators::pin(sums);
    me.keep_behind();
#pragma unroll 1
    for (int source = 0; source < Config::kSources; ++source) {
      if constexpr (kFull > 0) {
        const int end = at.end_chunk() < kFull ? at.end_chunk() : kFull;
        multiply_chunks<Layout::kPartSteps>(args, me, totals, sums, slabs, source, at.first_chunk(), end,
                                            last_pass);
      }
      if constexpr (kFull < Layout::kChunks) {
        multiply_chunks<Layout::kLastSteps>(args, me, totals, sums, slabs, source, kFull, at.end_chunk(),
                                            last_pass);
      }
    }
    ptx::matrix_wait<0>();
    Accumulators::pin(sums);
    me.release();
    if constexpr (Config::kDivision == Division::kLastTiles) me.end_lead();
  }

  static __device__ __forceinline__ void consume(const Args& args, const Shared& shared, int consumer,
                                                 int warp, int lane) {
    Consumer me = Consumer::make(shared, consumer, warp, lane);
    Sums sums;
    [[maybe_unused]] typename Accumulators::Kept bias;
    if constexpr (Accumulators::kKeepsBias) bias = Accumulators::Kept::load(args, lane);
    if constexpr (Config::kWeights == Weights::kResident) ptx::barrier_wait(shared.panels_full(), 0);
    for (auto work = Tile::Work::of_block(args); work.left(args); work.advance(args)) {
      const Place at = work.place(args);
      me.variant = at.variant();
      me.depth = at.d;
      me.depths = at.depths;
      const Ring<Config::kStages> first_stage = me.stages;
      for (int pass = 0; pass < args.passes; ++pass) {
        me.stages = first_stage;
        Slab slabs[Config::kSlabs];
#pragma unroll
        for (int m = 0; m < Config::kSlabs; ++m) {
          const int first =
              Config::kDivision == Division::kConsumers ? pass : pass * Config::kConsumers + consumer;
          slabs[m] = Tile::slab(args, first * Config::kSlabs + m);
        }
        typename Lines::Pairs pairs;
        if constexpr (Config::kInput == Input::kLines) Lines::find(args, slabs, warp, lane, pairs);
        typename Accumulators::Start start;
        if constexpr (Accumulators::kKeepsBias) {
          start = bias.of(at);
        } else {
          start = Accumulators::Start::load(args, at, lane);
        }
        if (Config::kDivision == Division::kConsumers && consumer > 0) start = {};
        Accumulators::start_fields(args, start, sums);
        const int fed = Tile::fed_planes(args, at);
        typename Images::Rows rows;
        if constexpr (Config::kOutput == Output::kImages) rows = Images::rows(args, at, slabs[0], me);
        typename AllMoments::Marching moments;
        if constexpr (Config::Epilogue::kLeavesMoments && Config::kMarch) {
          moments.start(args, at, slabs, warp, lane);
        }
        typename LongRuns::Waiting waiting;  // outputs of the previous step that are not written yet
        for (int plane = 0; plane < at.planes; ++plane) {
          // Consumers that share a tile's sums, or leave a piece of them, do not know whose outputs they are.
          if constexpr (Config::kDivision != Division::kNobody) {
          } else if constexpr (Config::kInput == Input::kLines) {
            Finishing::prefetch_pairs(args, at, pairs, at.first_plane + plane, lane);
          } else {
            Finishing::prefetch(args, at, slabs, at.first_plane + plane, warp, lane);
          }
          if constexpr (Config::kInput == Input::kLines) {
            if (plane < fed) {
              Lines::multiply(args, at, me, sums, pairs, at.first_plane + plane, [&](auto turn) {
                if constexpr (LongRuns::kLater) {
                  LongRuns::template write_between<decltype(turn)::value, Lines::kStepTurns>(args, me, pairs,
                                                                                             waiting);
                }
              });
            } else if constexpr (LongRuns::kLater) {
              LongRuns::write_all(args, me, pairs, waiting);
            }
          } else if constexpr (Config::kInput == Input::kInRegisters) {
            if (plane < fed) HaloRegisters<Config>::multiply(args, me, sums, slabs);
          } else {
            if (!Config::kMarch || plane < fed) multiply(args, me, sums, slabs, at, pass == args.passes - 1);
          }
          if constexpr (Config::kDivision == Division::kConsumers) {
            if (!HaloDivided<Config>::join(me, sums)) continue;
          }
          if constexpr (Config::kDivision == Division::kLastTiles) {
            if (!at.whole()) {
              const int piece = at.slot() * Config::kConsumers + consumer;
              HaloPieces<Config>::leave(args, piece * Config::kSlabs, 32 * warp + lane, sums);
              continue;
            }
          }
          if constexpr (Config::kInput == Input::kLines) {
            Finishing::apply_to_pairs(args, at, pairs, at.first_plane + plane, lane, sums);
          } else {
            Finishing::apply(args, at, slabs, at.first_plane + plane, warp, lane, sums);
          }
          if constexpr (Config::Epilogue::kOverChannels) {
            if constexpr (Config::kInput == Input::kLines) {
              HaloChannels<Config>::run_on_pairs(args, at, pairs, at.first_plane + plane, lane, sums);
            } else {
              HaloChannels<Config>::run(args, at, slabs, at.first_plane + plane, warp, lane, sums);
            }
          }
          if constexpr (Config::Epilogue::kLeavesMoments && Config::kMarch) {
            moments.add(args, at, sums, at.first_plane + plane, lane);
          } else if constexpr (Config::Epilogue::kLeavesMoments) {
            const long long slot = AllMoments::slot(args, at, at.tile, pass, 4 * consumer + warp);
            AllMoments::leave(args, at, sums, slabs, slot, warp, lane);
          }
          if constexpr (Config::Epilogue::kOnePerPosition) {
            // HaloChannels has stored the result.
          } else if constexpr (Config::kOutput == Output::kLongRuns) {
            LongRuns::take(args, at, sums, at.first_plane + plane, waiting);
            if constexpr (!LongRuns::kLater) LongRuns::write_all(args, me, pairs, waiting);
          } else if constexpr (Config::kInput == Input::kLines && sizeof(typename Config::Scalar) == 2) {
            HaloWords<Config>::store(args, at, me, sums, pairs, at.first_plane + plane);
          } else if constexpr (Config::kInput == Input::kLines) {
            Lines::store(args, at, me, sums, pairs, at.first_plane + plane);
          } else if constexpr (Config::kOutput == Output::kImages) {
            Images::store(args, at, me, sums, rows, plane);
          } else {
            Stores::store_outputs(args, at, me, sums, slabs, at.first_plane + plane);
          }
          if constexpr (Config::kMarch) Accumulators::move_window(args, start, sums);
        }
        if constexpr (Config::Epilogue::kLeavesMoments && Config::kMarch) {
          moments.store(args, at, 4 * consumer + warp, lane);
        }
        if constexpr (Config::kOutput == Output::kLongRuns) LongRuns::write_all(args, me, pairs, waiting);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void run_roles(const Args& args) {
  using Choices = HaloChoices<Config>;
  using Shared = HaloShared<Config>;
  const Shared shared{ptx::shared_address(dynamic_shared<unsigned char>())};
  // The shuffle broadcasts lane 0's value, so that the compiler knows the warp index to be warp-uniform.
  // Values derived from it, above all operand addresses, then live in uniform registers, as matrix
  // instructions need them.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The next launch, which adds up portions, pieces or moments, may begin now: it waits for this launch
  // before it reads them.
  if constexpr (Choices::kDividesTiles || Config::Epilogue::kLeavesMoments) ptx::launch_dependents();
  if (threadIdx.x == 0) shared.start_barriers();
  if (args.whole_lines) shared.clear_stages();
  __syncthreads();

  if (threadIdx.x < Shared::kProducerThreads) {
    ptx::keep_registers<Config::kProducerRegisters>();
    if constexpr (Config::kInput == Input::kLines) {
      if (threadIdx.x == 0) HaloPanels<Config>::load_all(args, shared);
      if (warp == 1) {
        HaloLines<Config>::copy(args, shared, lane);
      } else if constexpr (Config::kOutput == Output::kLongRuns) {
        HaloLongRuns<Config>::store(args, shared, warp == 0 ? 0 : warp - 1, lane);
      }
    } else if constexpr (Config::kWeights == Weights::kResident) {
      if (threadIdx.x == 0) HaloPanels<Config>::load_all(args, shared);
      HaloLoaders<Config>::load(args, shared, warp, lane);
    } else if (warp == 0) {
      if (lane == 0) HaloPanels<Config>::stream(args, shared);
    } else {
      HaloLoaders<Config>::load(args, shared, warp - 1, lane);
    }
    if constexpr (Config::Epilogue::kLeavesMoments && Config::kMarch) {
      if (warp == 1) HaloMoments<Config>::leave_nothing(args, lane);
    }
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    Halo<Config>::consume(args, shared, (warp - Shared::kProducerThreads / 32) / 4, warp % 4, lane);
  }
}

template <class Config>
__device__ void run(const Args& args) {
  if constexpr (Config::kAdds) {
    HaloAdding<Config>::add(args);
  } else {
    run_roles<Config>(args);
  }
}

}  // namespace tconv3d
