//! The suffix automaton of a growing text: every part of the text is a path from its root.

use hashbrown::HashMap;

/// The state of the empty text.
const ROOT: u32 = 0;
/// No state, or no edge.
const NONE: u32 = u32::MAX;

/// Suffixes whose latest place is kept up to date with each token, longest first. Shorter ones may lag behind.
const REFRESHED: usize = 16;

/// A suffix automaton, built token by token (Blumer and others, "The smallest automaton recognizing the subwords of a
/// text", 1985). It takes amortised constant time and two states a token at most.
#[derive(Debug, Clone)]
pub struct Automaton {
    text: Vec<u32>,
    states: Vec<State>,
    edges: HashMap<(u32, u32), u32>,
    /// The tokens that leave each state, as lists: token, and the next entry.
    leaving: Vec<(u32, u32)>,
    /// The state of the whole text.
    whole: u32,
}

/// Parts of the text that end at the same places.
#[derive(Debug, Clone, Copy)]
struct State {
    /// Tokens of the longest of them.
    length: u32,
    /// The state of the longest suffix that ends at more places.
    link: u32,
    /// Where such a part ended lately: the position of the token behind it.
    end: u32,
    /// First entry of its list of leaving tokens.
    leaving: u32,
    /// How many different tokens follow.
    followers: u32,
}

/// A suffix of some text that occurs in the automaton's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    state: u32,
    /// Tokens of it.
    pub length: usize,
}

impl Default for Automaton {
    fn default() -> Self {
        let root = State { length: 0, link: NONE, end: 0, leaving: NONE, followers: 0 };
        Self { text: Vec::new(), states: vec![root], edges: HashMap::new(), leaving: Vec::new(), whole: ROOT }
    }
}

impl Automaton {
    /// The text so far.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// Puts a token at the end of the text.
    pub fn push(&mut self, token: u32) {
        // What ended before this token now has one that follows.
        let here = self.text.len() as u32;
        let mut suffix = self.states[self.whole as usize].link;
        for _ in 0..REFRESHED {
            if suffix == ROOT || suffix == NONE {
                break;
            }
            self.states[suffix as usize].end = here;
            suffix = self.states[suffix as usize].link;
        }
        self.text.push(token);
        let state =
            self.add(State { length: here + 1, link: ROOT, end: here + 1, leaving: NONE, followers: 0 });
        let mut from = std::mem::replace(&mut self.whole, state);
        let target = loop {
            if from == NONE {
                return;
            }
            match self.edges.get(&(from, token)) {
                Some(&target) => break target,
                None => self.connect(from, token, state),
            }
            from = self.states[from as usize].link;
        };
        let length = self.states[from as usize].length + 1;
        let link = if self.states[target as usize].length == length {
            target
        } else {
            let split = self.split(target, length);
            while from != NONE
                && let Some(to) = self.edges.get_mut(&(from, token)).filter(|to| **to == target)
            {
                *to = split;
                from = self.states[from as usize].link;
            }
            split
        };
        self.states[state as usize].link = link;
    }

    /// The longest suffix of the text that occurs before, too.
    pub fn repeated(&self) -> Match {
        let link = self.states[self.whole as usize].link;
        self.all_of(if link == NONE { ROOT } else { link })
    }

    /// What is left of a match when a token follows.
    pub fn follow(&self, mut found: Match, token: u32) -> Match {
        loop {
            if let Some(&state) = self.edges.get(&(found.state, token)) {
                return Match { state, length: found.length + 1 };
            }
            let link = self.states[found.state as usize].link;
            if link == NONE {
                return self.all_of(ROOT);
            }
            found = self.all_of(link);
        }
    }

    /// The token that followed a match the last time, what part of the match that is known of, and whether it is the only
    /// one that ever did. None for the empty match.
    pub fn next(&self, mut found: Match) -> Option<(u32, usize, bool)> {
        while found.state != ROOT {
            let state = self.states[found.state as usize];
            // The end of the whole text is followed by nothing yet.
            if let Some(&token) = self.text.get(state.end as usize) {
                return Some((token, found.length, state.followers == 1));
            }
            found = self.all_of(state.link);
        }
        None
    }

    fn all_of(&self, state: u32) -> Match {
        Match { state, length: self.states[state as usize].length as usize }
    }

    fn add(&mut self, state: State) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    fn connect(&mut self, from: u32, token: u32, to: u32) {
        self.edges.insert((from, token), to);
        let state = &mut self.states[from as usize];
        self.leaving.push((token, state.leaving));
        state.leaving = (self.leaving.len() - 1) as u32;
        state.followers += 1;
    }

    /// Takes the parts of up to `length` tokens out of a state, into one of their own.
    fn split(&mut self, target: u32, length: u32) -> u32 {
        let whole = self.states[target as usize];
        let split = self.add(State { length, leaving: NONE, followers: 0, ..whole });
        let mut entry = whole.leaving;
        while let Some(&(token, next)) = self.leaving.get(entry as usize) {
            if let Some(&to) = self.edges.get(&(target, token)) {
                self.connect(split, token, to);
            }
            entry = next;
        }
        self.states[target as usize].link = split;
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &[u32]) -> Automaton {
        let mut automaton = Automaton::default();
        text.iter().for_each(|&token| automaton.push(token));
        automaton
    }

    /// Texts over few tokens, so that much repeats.
    fn texts() -> impl Iterator<Item = Vec<u32>> {
        (0..60u32).map(|seed| {
            let alphabet = 1 + seed % 5;
            let next = |x: &u32| Some(x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
            std::iter::successors(Some(seed), next).take(90).map(|x| (x >> 16) % alphabet).collect()
        })
    }

    /// Length of the longest suffix of `pattern` that occurs in `text` and is followed by a token there.
    fn longest(text: &[u32], pattern: &[u32], followed: bool) -> usize {
        let room = text.len() - usize::from(followed);
        let occurs = |part: &[u32]| part.is_empty() || text[..room].windows(part.len()).any(|w| w == part);
        (0..=pattern.len()).rev().find(|&length| occurs(&pattern[pattern.len() - length..])).unwrap()
    }

    #[test]
    fn the_longest_repeated_suffix_is_found_after_every_token() {
        for text in texts() {
            let mut automaton = Automaton::default();
            for (place, &token) in text.iter().enumerate() {
                automaton.push(token);
                let so_far = &text[..=place];
                let expected = longest(so_far, so_far, true);
                assert_eq!(automaton.repeated().length, expected, "{so_far:?}");
            }
            assert!(automaton.states.len() <= 2 * text.len());
        }
    }

    #[test]
    fn a_match_follows_any_text_and_its_next_token_followed_it_somewhere() {
        for (text, other) in texts().zip(texts().skip(7)) {
            let automaton = of(&text);
            let mut found = automaton.repeated();
            let mut pattern = text.clone();
            // The text itself is no earlier occurrence of its end.
            for &token in other.iter().take(20) {
                found = automaton.follow(found, token);
                pattern.push(token);
                let length = found.length;
                assert!(
                    text.windows(length.max(1))
                        .any(|w| length == 0 || w == &pattern[pattern.len() - length..])
                );
                if let Some((next, known, only)) = automaton.next(found) {
                    assert!(known >= 1 && known <= length);
                    let part = &pattern[pattern.len() - known..];
                    let followers: Vec<u32> = (0..text.len() - known)
                        .filter(|&at| &text[at..at + known] == part)
                        .map(|at| text[at + known])
                        .collect();
                    assert!(followers.contains(&next), "{next} never followed {part:?} in {text:?}");
                    assert!(!only || followers.iter().all(|&token| token == next), "{part:?} in {text:?}");
                }
            }
        }
    }

    #[test]
    fn the_latest_place_is_taken_and_a_period_goes_on() {
        let automaton = of(&[1, 2, 3, 1, 2, 4, 1, 2]);
        assert_eq!(automaton.next(automaton.repeated()), Some((4, 2, false)));
        let automaton = of(&[7, 8, 9, 7, 8, 9]);
        let mut found = automaton.repeated();
        let mut guessed = Vec::new();
        for _ in 0..7 {
            let (token, ..) = automaton.next(found).unwrap();
            guessed.push(token);
            found = automaton.follow(found, token);
        }
        assert_eq!(guessed, [7, 8, 9, 7, 8, 9, 7]);
        assert_eq!(of(&[5]).next(of(&[5]).repeated()), None);
        assert_eq!(Automaton::default().next(Automaton::default().repeated()), None);
    }
}
