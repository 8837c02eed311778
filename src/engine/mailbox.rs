//! The channel from the engine's thread to one listener.
//!
//! The engine never waits for a listener, and a slow one costs no more memory than its reply: progress and drafts
//! replace older ones that were not read, and when many events wait, new commits join the last one. The last draft before
//! a commit is kept beside it, since both often come in one instant: who reads at once has every draft.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use super::shared::Shared;
use super::{Event, FinishReason};

/// Unread events from which on commits are joined.
const CROWDED: usize = 64;

#[derive(Default)]
struct Unread {
    events: VecDeque<Event>,
    complete: bool,
}

#[derive(Default)]
struct Mailbox {
    unread: Mutex<Unread>,
    arrived: Notify,
    abandoned: AtomicBool,
}

/// The engine's end.
pub(super) struct Sender(Arc<Mailbox>);

impl Sender {
    /// Hands an event over; never waits. Nothing comes after [`Event::Finish`].
    pub(super) fn send(&self, event: Event) {
        let mut unread = self.0.unread.lock().unwrap_or_else(PoisonError::into_inner);
        if unread.complete {
            return;
        }
        unread.complete = matches!(event, Event::Finish { .. });
        let crowded = unread.events.len() >= CROWDED;
        // A newer draft replaces the one before it, and so does a commit for a listener who is far behind.
        let replaces =
            matches!(event, Event::Draft { .. }) || crowded && matches!(event, Event::Commit { .. });
        if replaces && matches!(unread.events.back(), Some(Event::Draft { .. })) {
            unread.events.pop_back();
        }
        match (unread.events.back_mut(), event) {
            (
                Some(Event::Commit { tokens, text, reasoning, calls, logprobs }),
                Event::Commit { tokens: more, text: on, reasoning: thought, calls: called, logprobs: told },
            ) if crowded => {
                logprobs.extend(told);
                tokens.extend(more);
                text.push_str(&on);
                reasoning.push_str(&thought);
                calls.extend(called);
            }
            (Some(last @ Event::Prefill { .. }), event @ Event::Prefill { .. }) => *last = event,
            (_, event) => unread.events.push_back(event),
        }
        drop(unread);
        self.0.arrived.notify_one();
    }

    /// Whether nobody listens any more.
    pub(super) fn abandoned(&self) -> bool {
        self.0.abandoned.load(Ordering::Acquire)
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.unread.lock().unwrap_or_else(PoisonError::into_inner).complete = true;
        self.0.arrived.notify_one();
    }
}

/// The listener's end. Dropping it cancels the job.
pub struct Events {
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    ticket: u64,
}

impl Events {
    /// The next event, in order; `None` after [`Event::Finish`]. Safe to drop while it waits.
    pub async fn recv(&mut self) -> Option<Event> {
        loop {
            {
                let mut unread = self.mailbox.unread.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(event) = unread.events.pop_front() {
                    return Some(event);
                }
                if unread.complete {
                    return None;
                }
            }
            // `notify_one` leaves a permit when nobody waits yet, so nothing is missed between the check and here.
            self.mailbox.arrived.notified().await;
        }
    }
}

impl Events {
    /// Waits until the reply begins, and drops progress and guesses that come before. Returns why there is none, if it
    /// ends instead; that event, too, is left to [`Self::recv`]. Safe to drop while it waits.
    pub async fn begun(&mut self) -> Option<FinishReason> {
        loop {
            {
                let mut unread = self.mailbox.unread.lock().unwrap_or_else(PoisonError::into_inner);
                while matches!(unread.events.front(), Some(Event::Prefill { .. } | Event::Draft { .. })) {
                    unread.events.pop_front();
                }
                match unread.events.front() {
                    Some(Event::Finish { reason, .. }) => return Some(reason.clone()),
                    Some(_) => return None,
                    None if unread.complete => return None,
                    None => {}
                }
            }
            self.mailbox.arrived.notified().await;
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.mailbox.abandoned.store(true, Ordering::Release);
        self.shared.abandon(self.ticket);
    }
}

/// A new channel for the job with `ticket`.
pub(super) fn mailbox(shared: &Arc<Shared>, ticket: u64) -> (Sender, Events) {
    let mailbox = Arc::new(Mailbox::default());
    (Sender(Arc::clone(&mailbox)), Events { mailbox, shared: Arc::clone(shared), ticket })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Stats, Usage};

    fn draft(step: usize) -> Event {
        Event::Draft { tokens: vec![1], entropy: vec![0.5], canvas: 0, step }
    }

    fn commit() -> Event {
        let text = "a".to_owned();
        Event::Commit {
            tokens: vec![1],
            text,
            reasoning: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    /// What a listener who was away finds: steps of drafts and lengths of commits.
    fn unread(sender: &Sender) -> Vec<(&'static str, usize)> {
        let unread = sender.0.unread.lock().unwrap();
        let told = |event: &Event| match event {
            Event::Draft { step, .. } => ("draft", *step),
            Event::Commit { text, .. } => ("commit", text.len()),
            Event::Prefill { done, .. } => ("prefill", *done),
            Event::Finish { .. } => ("finish", 0),
        };
        unread.events.iter().map(told).collect()
    }

    #[test]
    fn the_last_draft_before_a_commit_is_told() {
        let sender = Sender(Arc::default());
        for event in [draft(1), draft(2), commit(), draft(1), commit()] {
            sender.send(event);
        }
        assert_eq!(unread(&sender), [("draft", 2), ("commit", 1), ("draft", 1), ("commit", 1)]);
    }

    #[test]
    fn a_listener_who_is_far_behind_costs_no_more_than_the_reply() {
        let sender = Sender(Arc::default());
        for _ in 0..1000 {
            sender.send(draft(1));
            sender.send(draft(2));
            sender.send(commit());
        }
        let (usage, stats) = (Usage::default(), Stats::default());
        sender.send(Event::Finish { reason: FinishReason::Stop, usage, stats });
        let events = unread(&sender);
        assert!(events.len() <= CROWDED + 2, "{}", events.len());
        let length = |(kind, length): &(&str, usize)| if *kind == "commit" { *length } else { 0 };
        assert_eq!(events.iter().map(length).sum::<usize>(), 1000);
    }
}
