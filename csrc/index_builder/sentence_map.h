// Samples of whole sentences, in exactly Megatron's order.
//
// Source: the algorithm of bigscience Megatron-DeepSpeed, megatron/data/helpers.cpp (`build_mapping`). Its generators are
// those of the C++ standard, whose numbers are the same on all platforms.

#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace sentence_map {

struct Rules {
    std::int64_t epochs;           // most passes over the documents
    std::int64_t samples;          // no further pass starts once this many samples exist
    std::uint32_t most_tokens;     // target length of a sample that is not short
    std::uint32_t short_ratio;     // one in this many samples is short; 0 for none
    std::uint32_t seed;
    std::int64_t least_sentences;  // in a sample
};

// The target length of the next sample, in tokens.
inline std::uint32_t draw_length(const Rules& rules, std::mt19937& random) {
    if (rules.short_ratio == 0) {
        return rules.most_tokens;
    }
    const auto drawn = static_cast<std::uint32_t>(random());
    return drawn % rules.short_ratio ? rules.most_tokens : 2 + drawn % (rules.most_tokens - 1);
}

// Rows of (first sentence, one past the last, number of tokens), one after another, for documents that hold the
// sentences [firsts[d], lasts[d]).
template <typename Entry>
std::vector<Entry> build(const std::int32_t* lengths, const std::int64_t* firsts, const std::int64_t* lasts,
                         std::int64_t documents, const Rules& rules) {
    std::vector<Entry> rows;
    std::mt19937 random(rules.seed);
    for (std::int64_t epoch = 0; epoch < rules.epochs; ++epoch) {
        if (static_cast<std::int64_t>(rows.size() / 3) >= rules.samples) {
            break;
        }
        const std::size_t before = rows.size();
        for (std::int64_t document = 0; document < documents; ++document) {
            const std::int64_t last = lasts[document];
            std::int64_t first = firsts[document];
            std::int64_t tokens = 0;
            std::uint32_t wanted = draw_length(rules, random);
            for (std::int64_t sentence = first; sentence < last; ++sentence) {
                tokens += lengths[sentence];
                const std::int64_t left = last - sentence - 1;
                const bool is_full =
                    tokens >= wanted && left > 1 && sentence + 1 - first >= rules.least_sentences;
                if (is_full || left == 0) {
                    rows.push_back(static_cast<Entry>(first));
                    rows.push_back(static_cast<Entry>(sentence + 1));
                    rows.push_back(static_cast<Entry>(wanted));
                    first = sentence + 1;
                    tokens = 0;
                    wanted = draw_length(rules, random);
                }
            }
        }
        if (rows.size() == before) {
            break;  // no pass would add any
        }
    }
    std::mt19937_64 order(static_cast<std::uint64_t>(rules.seed) + 1);
    for (std::uint64_t place = rows.size() / 3; place-- > 1;) {
        const std::uint64_t chosen = order() % (place + 1);
        for (std::uint64_t column = 0; column < 3; ++column) {
            std::swap(rows[3 * place + column], rows[3 * chosen + column]);
        }
    }
    return rows;
}

}  // namespace sentence_map
