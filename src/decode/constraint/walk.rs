//! The walk through a compiled form, token by token.

use std::collections::VecDeque;

use llguidance::Matcher;

use super::{Allowed, Compiled, Constraint, ConstraintError, Mask, Thoughts, told};

/// Line breaks between thoughts and the reply that are layout.
const BREAKS: u8 = 2;

/// Where a reply is in its form.
pub(in crate::decode) struct Walk {
    matcher: Matcher,
    constraint: Constraint,
    place: Place,
    /// What may come next, once it was asked for.
    next: Option<Next>,
    /// Tokens that come next whatever the model says.
    forced: VecDeque<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The model may open the thinking channel yet.
    Before,
    /// In the thinking channel.
    Thoughts,
    /// Behind it; so many line breaks may come.
    Behind(u8),
    /// In the form.
    Form,
    /// At its end.
    Over,
}

#[derive(Debug)]
enum Next {
    One(u32),
    Only(Mask),
    /// Thoughts go on, but do not end the reply.
    Thoughts,
}

impl Walk {
    /// From the beginning, behind a prompt.
    pub(in crate::decode) fn new(constraint: &Constraint, prompt: &[u32]) -> Self {
        let compiled = &constraint.compiled;
        let place = match &constraint.thoughts {
            None => Place::Form,
            Some(Thoughts { open, close, .. }) => {
                let marks = |id: &&u32| *id == open || *id == close || compiled.ends.contains(id);
                match prompt.iter().rev().find(marks) {
                    Some(last) if last == open => Place::Thoughts,
                    // Thoughts that the prompt has closed are not opened again.
                    Some(last) if last == close => Place::Form,
                    _ => Place::Before,
                }
            }
        };
        Self {
            // Caches of its own: what happened in another generation must change nothing.
            matcher: compiled.matcher.deep_clone(),
            constraint: constraint.clone(),
            place,
            next: None,
            forced: VecDeque::new(),
        }
    }

    /// Which tokens may come next.
    ///
    /// # Errors
    /// The form takes too much.
    pub(in crate::decode) fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.next.is_none() {
            self.next = Some(self.find()?);
        }
        Ok(match &self.next {
            Some(Next::One(token)) => Allowed::One(*token),
            Some(Next::Only(mask)) => Allowed::Only(mask),
            Some(Next::Thoughts) => Allowed::Except(&self.constraint.compiled.ends),
            None => Allowed::All,
        })
    }

    /// Tokens that come next whatever the model says; as far as [`Walk::allowed`] has seen.
    pub(in crate::decode) fn forced(&self) -> impl Iterator<Item = u32> + '_ {
        self.forced.iter().copied()
    }

    /// A token was chosen, one of those that are allowed.
    ///
    /// # Errors
    /// The form takes too much.
    pub(in crate::decode) fn take(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.next = None;
        let forced = self.forced.pop_front();
        let thoughts = self.constraint.thoughts.as_ref();
        match self.place {
            Place::Before if thoughts.is_some_and(|thoughts| thoughts.open == token) => {
                self.place = Place::Thoughts;
                self.forced.clear();
                return Ok(());
            }
            Place::Thoughts => {
                if let Some(thoughts) = thoughts.filter(|thoughts| thoughts.close == token) {
                    self.place = if thoughts.breaks { Place::Behind(BREAKS) } else { Place::Form };
                }
                return Ok(());
            }
            Place::Behind(left) => {
                let breaks = self.constraint.compiled.breaks.iter().find(|(id, _)| *id == token);
                if let Some((_, count)) = breaks.filter(|(_, count)| *count <= left) {
                    self.place = Place::Behind(left - count);
                    return Ok(());
                }
            }
            Place::Over => return Ok(()),
            Place::Before | Place::Form => {}
        }
        if self.constraint.compiled.ends.contains(&token) {
            self.place = Place::Over;
            self.forced.clear();
            return Ok(());
        }
        self.place = Place::Form;
        if forced.is_some_and(|forced| forced != token) {
            self.forced.clear();
        }
        self.matcher.consume_token(token).map_err(|error| ConstraintError::Walk(told(&error)))
    }

    fn find(&mut self) -> Result<Next, ConstraintError> {
        let Compiled { breaks, .. } = &*self.constraint.compiled;
        let more: Vec<u32> = match (self.place, &self.constraint.thoughts) {
            (Place::Thoughts, _) => return Ok(Next::Thoughts),
            (Place::Before, Some(thoughts)) => vec![thoughts.open],
            (Place::Behind(left), _) => {
                breaks.iter().filter(|(_, count)| *count <= left).map(|(token, _)| *token).collect()
            }
            _ => Vec::new(),
        };
        if let Some(&token) = self.forced.front() {
            return Ok(Next::One(token));
        }
        let ended = self.matcher.is_stopped();
        if let ([end], true, true) = (&*self.constraint.compiled.ends, ended, more.is_empty())
            && !self.matcher.is_error()
        {
            return Ok(Next::One(*end));
        }
        if !ended && more.is_empty() {
            self.forced.extend(self.matcher.compute_ff_tokens());
            if let Some(&token) = self.forced.front() {
                return Ok(Next::One(token));
            }
        }
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| ConstraintError::Walk(told(&error)))?;
        let mut mask = Mask::new(mask);
        more.into_iter().for_each(|token| mask.add(token));
        Ok(Next::Only(mask))
    }
}
