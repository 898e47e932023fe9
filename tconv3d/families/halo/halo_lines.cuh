// The halo kernel on input as it lies in memory (Input::kLines): marches over contiguous tensors.
//
// A tile has whole lines, so that its halo is one run of memory for every channel and plane, which the copy
// engine brings to a stage: [channel][line, w], channels a pitch apart. No warp transposes it. Consumers load
// the first operand out of the stage into registers, at any shift, and round it there. Rows of an operand in
// registers may be any positions: a lane takes a pair of neighbours, so that its sums are neighbouring
// outputs of a channel (four with both phases along w), which it stores directly without scratch (or, where
// rows of outputs begin at any address, as halo_long_runs.cuh says). Words that several shifts along w read
// are loaded once, and all units of these shifts multiply out of the same registers.
//
// With 16-bit types a word of a stage has two neighbouring positions of a channel, whereas an operand needs
// one position of two channels: a lane loads the words of four positions and four channels, and regroups
// their halves. Two slabs are woven for this: of every four positions in sequence, each slab has two.
//
// The input gradient marches too: a step takes the planes of dy of all phases along depth, one stage each. A
// plane feeds several planes of dx, the fields of the window, of which the first is complete after the step.
//
// Positions outside the input are not copied: lanes take zeros for them.
#pragma once

#include "halo_consumer.cuh"
#include "halo_words.cuh"

namespace tconv3d {

template <class Config>
struct HaloLines {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Slab = typename Tile::Slab;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Stores = HaloStores<Config>;
  using Consumer = HaloConsumer<Config>;

  static constexpr int kUnitColumns = Layout::kUnitColumns;
  static constexpr int kItem = sizeof(Scalar), kWordItems = 4 / kItem;
  static constexpr int kWoven = Shared::kWoven;  // slabs that share every 2 * kWoven positions in sequence
  static_assert(Config::kInput != Input::kLines || kItem == 4 ||
                    (Config::kSlabs % 2 == 0 && !Config::kGather),
                "16 bits march forward, two slabs at a time");
  static_assert(Config::kInput != Input::kLines || (Config::kReadStepW & (Config::kReadStepW - 1)) == 0,
                "two positions read from a multiple of the vectors that load() takes");

  // Returns the pitch of channels in a stage in 32-bit words: a multiple of 32 plus 8, so that the four
  // channels of a warp's load lie in different banks; with 16-bit types, where a load reads every second
  // channel, a multiple of 32 plus 4.
  static __device__ __forceinline__ int pitch(const Args& args) {
    constexpr int kBeside = 8 / kWordItems;
    return (args.rows / kWordItems + 31 - kBeside) / 32 * 32 + kBeside;
  }

  // Return the line and the word that a shift reads, relative to the position times the read step.
  static __device__ constexpr int line_of(int source, int shift) {
    return (Config::kShift(shift, 1) + Config::kOrigin(source, 1)) * Config::kReadStepH +
           Config::kReadPhase(source, 1);
  }
  static __device__ constexpr int word_of(int source, int shift) {
    return (Config::kShift(shift, 2) + Config::kOrigin(source, 2)) * Config::kReadStepW +
           Config::kReadPhase(source, 2) + Config::kShift(shift, 3);
  }
  // The first and the last line, or word, that any shift reads.
  struct Range {
    int first, last;
    __device__ constexpr int count() const { return last - first + 1; }
  };
  static __device__ constexpr Range range(bool lines) {
    Range all{1 << 20, -(1 << 20)};
    for (int source = 0; source < Config::kSources; ++source) {
      for (int shift = Layout::first_shift(source, 0); shift < Layout::first_shift(source, Config::kPatterns);
           ++shift) {
        const int at = lines ? line_of(source, shift) : word_of(source, shift);
        all = {at < all.first ? at : all.first, at > all.last ? at : all.last};
      }
    }
    return all;
  }
  static constexpr Range kHaloLines = range(true), kHaloWords = range(false);
  // Phases along depth of the planes of a step. A phase without taps is not read.
  static constexpr int kPhases = Config::kReadStepD;
  static __device__ constexpr bool is_read(int phase) {
    for (int source = 0; source < Config::kSources; ++source) {
      if (Config::kReadPhase(source, 0) == phase) return true;
    }
    return false;
  }

  // ---- One warp of the producers copies. With kOneAsks one lane issues the bulk copies of all channels,
  // otherwise each lane those of one channel. One lane takes a third of the time. Only 16-bit types use it:
  // in float32 it was 9% faster on one measured layer and 4% slower on another.
  static constexpr bool kOneAsks = kItem == 2;

  static __device__ __forceinline__ void copy(const Args& args, const Shared& shared, int lane) {
    Ring<Config::kStages> ring;
    for (auto work = Tile::Work::of_block(args); work.left(args); work.advance(args)) {
      const Place at = work.place(args);
      const int first = at.h * Config::kReadStepH + kHaloLines.first, above = first < 0 ? -first : 0;
      const int below = first + args.halo.h - args.input.h;
      const int lines = args.halo.h - above - (below > 0 ? below : 0);
      const unsigned bytes = lines > 0 ? kItem * lines * args.input.w : 0;
      const int own = kOneAsks ? 0 : lane;
      const unsigned to = 4 * own * pitch(args) + kItem * above * args.input.w;
      const Scalar* x = static_cast<const Scalar*>(args.x) + at.n * args.x_stride.n +
                        (at.first_group() * Config::kIn + own) * args.x_stride.c +
                        (first + above) * args.x_stride.h;
      const int begin = at.first_plane * kPhases, end = begin + Tile::fed_planes(args, at) * kPhases;
      for (int plane = begin; plane < end; ++plane) {
        if (!is_read(plane % kPhases)) continue;
        const bool there = bytes > 0 && plane < args.input.d;
        for (int chunk = 0; chunk < Layout::kChunks; ++chunk, ring.advance()) {
          const int left = Config::kIn - chunk * Layout::kPartItems;
          const int channels = left < Layout::kPartItems ? left : Layout::kPartItems;
          ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
          const unsigned full = shared.stage_full(ring.index), expected = there ? channels * bytes : 0;
          unsigned stage = shared.stage(ring.index) + to;
          const Scalar* from = x + plane * args.x_stride.d + chunk * Layout::kPartItems * args.x_stride.c;
          static_assert(Layout::kPartItems <= 32, "a channel for each lane");
          if constexpr (kOneAsks) {
            if (ptx::elected(lane)) {
              ptx::barrier_arrive_expect(full, expected);
#pragma unroll 4
              for (int channel = 0; channel < channels && there; ++channel) {
                ptx::bulk_copy(stage, from, bytes, full);
                stage += 4 * pitch(args);
                from += args.x_stride.c;
              }
            }
            __syncwarp();
          } else {
            if (lane == 0) ptx::barrier_arrive_expect(full, expected);
            __syncwarp();
            if (lane < channels && there) ptx::bulk_copy(stage, from, bytes, full);
          }
        }
      }
    }
  }

  // ---- Consumers multiply and store.

  // Two neighbouring positions of a slab, whose sums a lane has.
  struct Pair {
    bool exists;
    int h, w;  // coordinates of the first position in the tile
    int word;  // first word of a stage that the pair may read, in the lane's first channel
  };
  using Pairs = Pair[Config::kSlabs];
  static __device__ __forceinline__ void find(const Args& args, const Slab (&slabs)[Config::kSlabs], int warp,
                                              int lane, Pairs& pairs) {
    TCONV3D_ASSUME(args.by_columns.divisor % (2 * kWoven) == 0);  // a lane's positions lie in one line
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
      const Slab& slab = slabs[m / kWoven * kWoven];
      const int row = slab.row + 16 * kWoven * warp + lane / 4 * (2 * kWoven) + m % kWoven * 2;
      const int h = divide(row, args.by_columns);
      Pair& pair = pairs[m];
      pair.exists = slab.exists && h < args.tile.h;
      pair.h = pair.exists ? h : 0;
      pair.w = pair.exists ? row - h * static_cast<int>(args.by_columns.divisor) : 0;
      const int first = pair.h * Config::kReadStepH * args.input.w + pair.w * Config::kReadStepW;
      if constexpr (kItem == 4) {
        pair.word = first + kHaloWords.first + lane % 4 * pitch(args);
      } else {
        pair.word = first / 2 + kFirstWord + lane % 4 * (2 * pitch(args));
      }
    }
  }

  // Number of words of a line that feed a pair through all shifts along w, for each of the lane's two
  // channels in a step.
  static constexpr int kWords = kHaloWords.count() + Config::kReadStepW;
  // kAtOnce is the number of steps whose loads are in flight together. kSets is the number of register sets
  // for operands: one set is loaded while matrix instructions read the others.
  static constexpr int kAtOnce = Config::kStepsAtOnce, kSets = Config::kOperandSets;
  // With 16-bit types a lane loads kPairWords words from kFirstWord on, which cover its four positions, for
  // each of its four channels in a step.
  static constexpr int kFirstWord = (kHaloWords.first + 64) / 2 - 32;
  static constexpr int kPairWords = (kHaloWords.last + 3 + 64) / 2 - 32 - kFirstWord + 1;
  static_assert(kHaloWords.first > -64, "rounded down");
  struct Operands {
    unsigned words[Config::kSlabs][kAtOnce][2][kItem == 4 ? kWords : kPairWords];
    // Fragments of each shift along w, made of `words`.
    unsigned at[Config::kSlabs][kAtOnce][kHaloWords.count()][4];
  };

  // Returns how many words one load brings from this word on, or 0 if an earlier load brings it. A vector
  // lies either inside or outside the input as a whole.
  static __device__ constexpr int brought(int word) {
    constexpr int kMost = 2 * Config::kReadStepW < 4 ? 2 : 4;
    for (int vector = kMost; vector > 1; vector /= 2) {
      const int place = ((kHaloWords.first + word) % vector + vector) % vector;
      const int first = word - place;
      if (first >= 0 && first + vector <= kWords) return place == 0 ? vector : 0;
    }
    return 1;
  }

  // Loads the words of 8 channels of a line, from `stage` on. `plane` says whether the plane lies inside the
  // input.
  template <int kStep>
  static __device__ __forceinline__ void load(const Args& args, const Place& at, const Pairs& pairs,
                                              const float* stage, int line, bool plane, Operands& to) {
    static_for<Config::kSlabs>([&](auto m) {
      const Pair& pair = pairs[m];
      const bool inside = plane && Tile::inside((at.h + pair.h) * Config::kReadStepH + line, args.input.h);
      const float* from = stage + pair.word + (line - kHaloLines.first) * args.input.w;
      static_for<2 * kWords>([&](auto i) {
        constexpr int kHalf = decltype(i)::value / kWords, kWord = decltype(i)::value % kWords;
        constexpr int kVector = brought(kWord);
        if constexpr (kVector > 0) {
          const int w = pair.w * Config::kReadStepW + kHaloWords.first + kWord;
          const bool there = inside && Tile::inside(w, args.input.w);
          const float* address = from + 4 * kHalf * pitch(args) + kWord;
          const auto some = there ? load_vector<kVector>(address) : Vector<float, kVector>{};
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            to.words[m][kStep][kHalf][kWord + k] = Layout::operand(some.at[k], 0);
          }
        }
      });
    });
  }

  // Returns how many words, of two 16-bit positions each, one load brings from this word on, or 0 if an
  // earlier load brings it.
  static __device__ constexpr int pair_brought(int word) {
    const int place = (kFirstWord + word + 64) % 2, first = word - place;
    if (first >= 0 && first + 2 <= kPairWords) return place == 0 ? 2 : 0;
    return 1;
  }
  template <int kStep, bool kWhole>
  static __device__ __forceinline__ void load_pairs(const Args& args, const Place& at, const Pairs& pairs,
                                                    const unsigned* stage, int line, bool plane,
                                                    Operands& to) {
    static_for<Config::kSlabs / kWoven>([&](auto m) {
      constexpr int kSlab = decltype(m)::value * kWoven;
      const Pair& pair = pairs[kSlab];
      const bool inside = plane && Tile::inside(at.h + pair.h + line, args.input.h);
      const unsigned* from = stage + pair.word + (line - kHaloLines.first) * (args.input.w / 2);
      static_for<4 * kPairWords>([&](auto i) {
        constexpr int kChannel = decltype(i)::value / kPairWords, kWord = decltype(i)::value % kPairWords;
        constexpr int kVector = pair_brought(kWord);
        if constexpr (kVector > 0) {
          const bool there = inside && Tile::inside(pair.w + 2 * (kFirstWord + kWord), args.input.w) &&
                             (kWhole || kChannel < 2);
          const unsigned* address = from + (kChannel % 2 + kChannel / 2 * 8) * pitch(args) + kWord;
          const auto some = there ? load_vector<kVector>(address) : Vector<unsigned, kVector>{};
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            to.words[kSlab + kChannel / 2][kStep][kChannel % 2][kWord + k] = some.at[k];
          }
        }
      });
    });
  }
  template <int kCount>
  static __device__ __forceinline__ void share_pairs(Operands& own) {
    static_for<Config::kSlabs * kCount>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / kCount, kStep = decltype(i)::value % kCount;
      constexpr int kFirst = kSlab / kWoven * kWoven;
#pragma unroll
      for (int k = 0; k < 4 * kPairWords && kSlab == kFirst; ++k) {
        ptx::pin(own.words[kFirst + k % 2][kStep][k / 2 % 2][k / 4]);
      }
#pragma unroll
      for (int k = 0; k < 4 * kHaloWords.count(); ++k) {
        const auto& words = own.words[kFirst + k / 2 % 2][kStep];
        const int position = kSlab % kWoven * 2 + kHaloWords.first + k / 4 + k % 2 - 2 * kFirstWord;
        const unsigned even = words[0][position / 2], odd = words[1][position / 2];
        own.at[kSlab][kStep][k / 4][k % 4] =
            position % 2 == 0 ? ptx::low_halves(even, odd) : ptx::high_halves(even, odd);
      }
    });
  }

  // Keeps the registers of operands alive up to this point: matrix instructions read them some time after
  // they were issued, which the compiler does not know.
  static __device__ __forceinline__ void keep(Operands& own) {
    if constexpr (kItem == 2) {
      static_for<Config::kSlabs * kAtOnce * kHaloWords.count()>([&](auto i) {
        constexpr int kShifts = kHaloWords.count();
        auto& at = own.at[i / (kAtOnce * kShifts)][i / kShifts % kAtOnce][i % kShifts];
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::pin(at[k]);
      });
    }
  }

  // Makes the fragments of each shift out of the loaded words.
  template <int kCount>
  static __device__ __forceinline__ void share(Operands& own) {
    static_for<Config::kSlabs * kCount>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / kCount, kStep = decltype(i)::value % kCount;
      auto& words = own.words[kSlab][kStep];
#pragma unroll
      for (int k = 0; k < 2 * kWords; ++k) ptx::pin(words[k / kWords][k % kWords]);
#pragma unroll
      for (int k = 0; k < 4 * kHaloWords.count(); ++k) {
        own.at[kSlab][kStep][k / 4][k % 4] = words[k / 2 % 2][k / 4 + k % 2 * Config::kReadStepW];
      }
    });
  }

  // Issues the products of a step, for every shift that reads line kLine of a plane of phase kPhase.
  template <int kPhase, int kLine, int kStep>
  static __device__ __forceinline__ void issue(Sums& sums, const Operands& from, unsigned panels, int chunk) {
    static_for<Config::kSources * Config::kPatterns>([&](auto i) {
      constexpr int kSource = decltype(i)::value / Config::kPatterns;
      constexpr int kPattern = decltype(i)::value % Config::kPatterns;
      if constexpr (Config::kReadPhase(kSource, 0) == kPhase) {
        const auto b = ptx::matrix_descriptor<Layout::kPartBytes>(
            panels + Layout::chunk_start(kSource, chunk), 8 * Layout::kPartBytes);
        static_for<Layout::shifts(kSource, kPattern)>([&](auto s) {
          constexpr int kShift = Layout::first_shift(kSource, kPattern) + decltype(s)::value;
          if constexpr (line_of(kSource, kShift) == kLine) {
            constexpr int kPanel = Layout::rows_before(kSource, kPattern) * Layout::kPartBytes +
                                   decltype(s)::value * Layout::panel_bytes(kPattern);
            static_for<Layout::units(kPattern)>([&](auto u) {
              multiply_unit<kSource, kPattern, kShift, decltype(u)::value, kStep>(
                  sums, from,
                  ptx::advance(b,
                               kPanel + decltype(u)::value * kUnitColumns * Layout::kPartBytes + 32 * kStep));
            });
          }
        });
      }
    });
  }
  template <int kSource, int kPattern, int kShift, int kPlace, int kStep>
  static __device__ __forceinline__ void multiply_unit(Sums& sums, const Operands& from,
                                                       unsigned long long b) {
    // A shift towards later planes of dy adds to an earlier plane of dx.
    constexpr int kEarlier = Config::kShift(kShift, 0) + Config::kOrigin(kSource, 0);
    constexpr int kUnit = Config::kGather ? Config::kPaddingD - kEarlier
                                          : Config::kUnit(Config::kPatternUnit(kPattern) + kPlace);
    constexpr int kWord = word_of(kSource, kShift) - kHaloWords.first;
    static_for<Config::kSlabs>([&](auto m) {
      ptx::MatrixMultiply<kUnitColumns>::template issue<OperandOf<Scalar>::kOperand>(
          &sums[m][kUnit * kUnitColumns / 2], from.at[m][kStep % kAtOnce][kWord], b);
    });
  }

  // Multiplies one stage: lines of the halo one after the other, kAtOnce steps at a time, each of which is a
  // turn. While matrix instructions read one set of registers, the next turn is loaded into another. kBefore
  // is the number of turns of the march's step before this stage.
  static __device__ constexpr int turns(int steps) {
    return (steps + kAtOnce - 1) / kAtOnce * kHaloLines.count();
  }
  template <int kPhase, int kSteps, int kBefore, bool kLast, class Between>
  static __device__ __forceinline__ void multiply_stage(const Args& args, const Place& at, Consumer& me,
                                                        Sums& sums, const Pairs& pairs,
                                                        Operands (&operands)[kSets], int chunk, bool there,
                                                        Between&& between) {
    constexpr int kTurns = (kSteps + kAtOnce - 1) / kAtOnce, kAll = turns(kSteps);
    const float* stage =
        dynamic_shared<float>() + me.stages.index * static_cast<unsigned>(Shared::kStageBytes / 4);
    ptx::barrier_wait(me.shared.stage_full(me.stages.index), me.stages.parity);
    static_for<kAll>([&](auto i) {
      constexpr int kTurn = decltype(i)::value, kLine = kHaloLines.first + kTurn / kTurns;
      constexpr int kFirst = kTurn % kTurns * kAtOnce;
      constexpr int kCount = kSteps - kFirst < kAtOnce ? kSteps - kFirst : kAtOnce;
      Operands& own = operands[(kBefore + kTurn) % kSets];
      // The matrix instructions that read this set of registers must have finished.
      ptx::matrix_wait<kSets - 1>();
      if constexpr (kBefore + kTurn >= kSets) keep(own);
      static_for<kCount>([&](auto step) {
        constexpr int kStep = decltype(step)::value;
        const float* from = stage + (kFirst + kStep) * Layout::kStepItems * pitch(args);
        if constexpr (kItem == 4) {
          load<kStep>(args, at, pairs, from, kLine, there, own);
        } else {
          constexpr bool kWhole = Config::kIn % 16 == 0 || !kLast || kFirst + kStep < kSteps - 1;
          load_pairs<kStep, kWhole>(args, at, pairs, reinterpret_cast<const unsigned*>(from), kLine, there,
                                    own);
        }
      });
      if constexpr (kItem == 4) {
        share<kCount>(own);
      } else {
        share_pairs<kCount>(own);
      }
      ptx::matrix_fence();
      static_for<kCount>([&](auto step) {
        issue<kPhase, kLine, kFirst + decltype(step)::value>(sums, own, me.shared.panels(), chunk);
      });
      ptx::matrix_commit();
      if constexpr (kTurn == kAll - 1) ptx::barrier_arrive(me.shared.stage_empty(me.stages.index));
      if constexpr (kPhases > 1) {
        me.announce_lead();
      } else if constexpr (kBefore + kTurn + 1 == Config::kLead) {
        if (me.index == 0) me.announce();
      }
      between(Int<kBefore + kTurn>{});
    });
    me.stages.advance();
  }

  // Adds all chunks of the planes of a step to the sums. `between` is called after each turn.
  static constexpr int kStepTurns =
      kPhases * ((Layout::kChunks - 1) * turns(Layout::kPartSteps) + turns(Layout::kLastSteps));
  template <class Between>
  static __device__ __forceinline__ void multiply(const Args& args, const Place& at, Consumer& me, Sums& sums,
                                                  const Pairs& pairs, int plane, Between&& between) {
    Operands operands[kSets];
    Accumulators::pin(sums);
    me.keep_behind();
    static_for<kPhases * Layout::kChunks>([&](auto i) {
      constexpr int kPhase = decltype(i)::value / Layout::kChunks;
      constexpr int kChunk = decltype(i)::value % Layout::kChunks;
      constexpr int kBefore =
          kPhase * ((Layout::kChunks - 1) * turns(Layout::kPartSteps) + turns(Layout::kLastSteps)) +
          kChunk * turns(Layout::kPartSteps);
      constexpr int kSteps = kChunk == Layout::kChunks - 1 ? Layout::kLastSteps : Layout::kPartSteps;
      if constexpr (is_read(kPhase)) {
        const bool there = kPhase == 0 || plane * kPhases + kPhase < args.input.d;
        constexpr bool kLast = kChunk == Layout::kChunks - 1;
        multiply_stage<kPhase, kSteps, kBefore, kLast>(args, at, me, sums, pairs, operands, kChunk, there,
                                                       between);
      }
    });
    ptx::matrix_wait<0>();
    static_for<(kStepTurns < kSets ? kStepTurns : kSets)>([&](auto set) { keep(operands[set]); });
    Accumulators::pin(sums);
  }

  // Stores the outputs of two positions at a time, with both phases along w if there are two. A tile has
  // whole lines of outputs.
  static __device__ __forceinline__ void store(const Args& args, const Place& at, const Consumer& me,
                                               const Sums& sums, const Pairs& pairs, int plane) {
    static_assert(Config::kStrideW <= 2, "one phase or two of two positions");
    TCONV3D_ASSUME(Config::kStrideW * args.tile.w == args.output.w);
    const int d = plane * Config::kStrideD - Config::kPaddingD;
    const int channel =
        at.first_group() * Config::kOut + at.first_out() + Accumulators::first_column(me.lane);
    static_for<Config::kSlabs>([&](auto m) {
      const Pair& pair = pairs[m];
      const int h = (at.h + pair.h) * Config::kStrideH;
      Scalar* const y = static_cast<Scalar*>(args.y) + at.n * args.y_stride.n + channel * args.y_stride.c +
                        Stores::offset(args, d, h, pair.w * Config::kStrideW);
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value, kPartner = Config::kPartner(kField);
        if constexpr (kPartner != Config::kStoredByPartner && Accumulators::complete(kField)) {
          if (!(pair.exists && Stores::deep(args, at, d + Config::kField(kField, 0)) &&
                h + Config::kField(kField, 1) < args.output.h)) {
            return;
          }
          Scalar* line = y + Stores::field_start(args, 0, kField);
          ptx::pin(line);
          const float* first = &sums[m][kField * Config::kOutTile / 2];
          [[maybe_unused]] const float* second =
              &sums[m][(kPartner < 0 ? 0 : kPartner) * Config::kOutTile / 2];
#pragma unroll
          for (int i = 0; i < Config::kOutTile / 4; ++i) {
            const int out = i / 2 * 8 + i % 2, k = i / 2 * 4 + i % 2;
            if (Config::kOut % Config::kOutTile &&
                at.first_out() + Accumulators::first_column(me.lane) + out >= Config::kOut) {
              continue;
            }
            if constexpr (Config::kStrideW == 2) {
              store_vector(Stores::further(args, line, out),
                           Vector<Scalar, 4>{first[k], second[k], first[k + 2], second[k + 2]});
            } else {
              store_vector(Stores::further(args, line, out), Vector<Scalar, 2>{first[k], first[k + 2]});
            }
          }
        }
      });
    });
  }
};

}  // namespace tconv3d
