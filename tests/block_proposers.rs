//! Each proposer alone: what it guesses after what it was shown, and how far it trusts that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use axe::decode::block::{Context, FixedPoint, Guess, Lookup, Pool, Proposer, Recycled, Seen};
use axe::decode::{Sampler, Sampling, top_of};
use axe::ops::RowTop;

fn greedy() -> Sampler {
    Sampler::new(&Sampling::default(), &[])
}

/// The best of a row over 40 tokens in which these have these logits.
fn top(best: &[(u32, f32)]) -> RowTop {
    let mut logits = vec![-9.0; 40];
    best.iter().for_each(|&(token, logit)| logits[token as usize] = logit);
    top_of(&logits)
}

/// Shows a pass that began at the end of `text`, whose guesses were `guesses`, and after which `committed` was there.
fn show(
    proposer: &mut impl Proposer,
    sampler: &Sampler,
    text: &mut Vec<u32>,
    guesses: &[u32],
    committed: &[u32],
    tops: &[RowTop],
) {
    let start = text.len() - 1;
    let input = [&text[start..], guesses].concat();
    assert_eq!(tops.len(), input.len());
    text.extend_from_slice(committed);
    proposer.observe(&Seen { text, start, input: &input, tops, accepted: committed.len() - 1, sampler });
}

/// Guesses one after the other, each behind the ones before.
fn chain(proposer: &mut impl Proposer, sampler: &Sampler, text: &[u32], most: usize) -> Vec<Guess> {
    let (mut text, committed) = (text.to_vec(), text.len());
    let mut guesses = Vec::new();
    while guesses.len() < most
        && let Some(guess) = proposer.propose(&Context { text: &text, committed, sampler })
    {
        assert!((0.0..=1.0).contains(&guess.trust));
        text.push(guess.token);
        guesses.push(guess);
    }
    guesses
}

fn tokens(guesses: &[Guess]) -> Vec<u32> {
    guesses.iter().map(|guess| guess.token).collect()
}

#[test]
fn lookup_goes_on_where_the_text_was_before_and_trusts_long_matches_more() {
    let (mut lookup, sampler) = (Lookup::default(), greedy());
    lookup.begin();
    let mut text = vec![5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 20, 21, 30];
    lookup.read(&text[..4]);
    lookup.read(&text);
    assert_eq!(chain(&mut lookup, &sampler, &text, 4), [], "30 was never there before");
    show(&mut lookup, &sampler, &mut text, &[], &[6], &[top(&[(6, 1.0)])]);
    let short = chain(&mut lookup, &sampler, &text, 4);
    assert_eq!(tokens(&short), [7, 8, 9, 10]);
    assert!(short.windows(2).all(|pair| pair[1].trust >= pair[0].trust), "{short:?}");
    show(&mut lookup, &sampler, &mut text, &[7, 8], &[7, 8, 9], &[top(&[]); 3]);
    let long = chain(&mut lookup, &sampler, &text, 3);
    assert_eq!(tokens(&long), [10, 11, 12]);
    assert!(long[0].trust > short[0].trust);
    // Wrong guesses of one length cost that length its trust, and no other.
    (0..30).for_each(|_| lookup.learn(&long[0], false));
    let warned = chain(&mut lookup, &sampler, &text, 1)[0];
    assert!(warned.trust < 0.3 * long[0].trust && warned.kind == long[0].kind);
    // Another text begins anew.
    lookup.begin();
    lookup.read(&[1, 2, 3, 1]);
    assert_eq!(tokens(&chain(&mut lookup, &sampler, &[1, 2, 3, 1], 2)), [2, 3]);
    // A longer text of the same beginning goes on.
    lookup.begin();
    lookup.read(&[1, 2, 3, 1, 2, 4, 1, 2]);
    assert_eq!(tokens(&chain(&mut lookup, &sampler, &[1, 2, 3, 1, 2, 4, 1, 2], 2)), [4, 1]);
}

#[test]
fn recycled_successors_are_taken_by_rank_of_what_stood_before() {
    let (mut recycled, sampler) = (Recycled::default(), greedy());
    recycled.begin();
    let mut text = vec![1, 2];
    show(&mut recycled, &sampler, &mut text, &[], &[3], &[top(&[(3, 5.0), (4, 4.0)])]);
    show(&mut recycled, &sampler, &mut text, &[], &[4], &[top(&[(4, 5.0), (9, 1.0)])]);
    // Behind 2 comes 3, behind 3 comes 4; of 4 nothing is known.
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[7, 2], 5)), [3, 4]);
    // The latest counts; two tokens before are better than one.
    let mut other = vec![8, 2];
    show(&mut recycled, &sampler, &mut other, &[], &[5], &[top(&[(5, 3.0), (6, 2.5)])]);
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[7, 2], 1)), [5]);
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[1, 2], 1)), [3]);
    // A close decision is trusted less than a clear one, more of the text before more than less.
    let trust = |recycled: &mut Recycled, text: &[u32]| chain(recycled, &sampler, text, 1)[0].trust;
    assert!(trust(&mut recycled, &[2, 3]) > trust(&mut recycled, &[1, 2]));
    assert!(trust(&mut recycled, &[8, 2]) > trust(&mut recycled, &[7, 2]));
    // What a row saw behind a wrong guess is kept where nothing better is known.
    let mut third = vec![11];
    let tops = [top(&[(12, 9.0)]), top(&[(14, 9.0)]), top(&[(15, 9.0)])];
    show(&mut recycled, &sampler, &mut third, &[13, 2], &[12], &tops);
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[13], 1)), [14]);
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[8, 2], 1)), [5]);
    // Experience stays when another generation begins.
    recycled.begin();
    assert_eq!(tokens(&chain(&mut recycled, &sampler, &[1, 2], 1)), [3]);
    // Unless it is told to forget what was said; how far to trust it stays.
    let guess = chain(&mut recycled, &sampler, &[1, 2], 1)[0];
    (0..30).for_each(|_| recycled.learn(&guess, false));
    let warned = chain(&mut recycled, &sampler, &[1, 2], 1)[0].trust;
    recycled.forget();
    for text in [&[1, 2][..], &[8, 2], &[13], &[2, 3]] {
        assert_eq!(chain(&mut recycled, &sampler, text, 1), []);
    }
    let mut again = vec![1, 2];
    show(&mut recycled, &sampler, &mut again, &[], &[3], &[top(&[(3, 5.0), (4, 4.0)])]);
    assert_eq!(chain(&mut recycled, &sampler, &[1, 2], 1)[0].trust, warned);
}

#[test]
fn recycled_successors_are_drawn_with_the_noise_of_their_position() {
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
    let (mut recycled, mut sampler) = (Recycled::default(), Sampler::new(&sampling, &[]));
    let even = [(3, 5.0), (4, 5.0), (6, 5.0), (7, 5.0)];
    let mut seen = std::collections::HashSet::new();
    for position in 3..40 {
        let mut text: Vec<u32> = vec![9; position - 2];
        text.push(2);
        show(&mut recycled, &sampler, &mut text, &[], &[3], &[top(&even)]);
        let before = [&vec![8; position - 1][..], &[2]].concat();
        let guess = chain(&mut recycled, &sampler, &before, 1)[0].token;
        let mut logits = vec![-30.0; 40];
        even.iter().for_each(|&(token, logit)| logits[token as usize] = logit);
        assert_eq!(guess, sampler.choose(&logits, position).unwrap());
        seen.insert(guess);
    }
    assert_eq!(seen.len(), 4);
}

#[test]
fn a_fixed_point_keeps_what_rows_behind_a_wrong_guess_chose_at_their_positions() {
    let (mut fixed, sampler) = (FixedPoint::default(), greedy());
    fixed.begin();
    let mut text = vec![1, 2, 3];
    let tops = [top(&[(10, 4.0)]), top(&[(20, 4.0)]), top(&[(21, 4.0)]), top(&[(22, 4.0)])];
    // Positions 3 to 6: 30 was wrong, so what follows 31 and 32 was chosen behind it.
    show(&mut fixed, &sampler, &mut text, &[30, 31, 32], &[10], &tops);
    assert_eq!(text.len(), 4);
    assert_eq!(tokens(&chain(&mut fixed, &sampler, &text, 9)), [20, 21, 22]);
    let apart = chain(&mut fixed, &sampler, &text, 1)[0];
    // The same token as then stands before position 5 only: there the choice is trusted more.
    let context = [&text[..], &[31]].concat();
    let aligned = fixed.propose(&Context { text: &context, committed: 4, sampler: &sampler }).unwrap();
    assert_eq!(aligned.token, 21);
    assert!(aligned.trust > apart.trust);
    // A pass of one row leaves what lies further on.
    show(&mut fixed, &sampler, &mut text, &[], &[11], &[top(&[(11, 1.0)])]);
    assert_eq!(tokens(&chain(&mut fixed, &sampler, &text, 9)), [21, 22]);
    // All of this pass was right: nothing is left to say.
    show(&mut fixed, &sampler, &mut text, &[21, 22], &[21, 22, 23], &tops[..3]);
    assert_eq!(chain(&mut fixed, &sampler, &text, 9), []);
    fixed.begin();
    assert_eq!(chain(&mut fixed, &sampler, &[1, 2, 3, 4], 9), []);
}

#[test]
fn a_pool_remembers_what_other_generations_said() {
    let (mut pool, sampler) = (Pool::default(), greedy());
    let said = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13];
    let say = |pool: &mut Pool, first: u32| {
        pool.begin();
        let mut text = vec![first, 2, 3];
        for token in said {
            show(pool, &sampler, &mut text, &[], &[token], &[top(&[(token, 1.0)])]);
        }
    };
    assert_eq!(chain(&mut pool, &sampler, &[1, 2, 3], 3), []);
    say(&mut pool, 1);
    pool.begin();
    assert_eq!(tokens(&chain(&mut pool, &sampler, &[1, 2, 3], 20)), said);
    let once = chain(&mut pool, &sampler, &[30, 5, 6, 7], 1)[0];
    assert_eq!(once.token, 8);
    (0..4).for_each(|_| say(&mut pool, 31));
    assert!(chain(&mut pool, &sampler, &[30, 5, 6, 7], 1)[0].trust > once.trust, "said more often");
    // Something else that followed weakens it, and takes its place in the end.
    for _ in 0..6 {
        let mut text = vec![0, 5, 6, 7];
        show(&mut pool, &sampler, &mut text, &[], &[33], &[top(&[(33, 1.0)])]);
    }
    assert_eq!(tokens(&chain(&mut pool, &sampler, &[30, 5, 6, 7], 1)), [33]);
}
