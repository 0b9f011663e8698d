#include "attention.h"
#include "score_tile.h"

namespace flashbpt::cpu {

void dropout_mask(const AttentionParams& p, bool* keep) {
  static_assert(sizeof(bool) == sizeof(uint8_t));
  const std::vector<Sequence> seqs = sequences_of(p);
  const int64_t blocks = at::divup(p.len_q, kBlockQ);
  for_each_task(at::get_num_threads(), p.batch * p.heads_q * blocks, [&](int64_t i) {
    const int64_t row = i % blocks * kBlockQ, head = i / blocks % p.heads_q;
    const Sequence& seq = seqs[i / blocks / p.heads_q];
    const QueryTile q{&seq, head, 1, head, 1, row, std::min(kBlockQ, p.len_q - row)};
    bool* out = keep + ((seq.batch * p.heads_q + head) * p.len_q + row) * p.len_k;
    keep_tile(p, q, {0, p.len_k}, reinterpret_cast<uint8_t*>(out));
  });
}

}  // namespace flashbpt::cpu
