//! The engine over a scripted backend: order, limits, stops, cancellation, failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod stage;

use std::time::{Duration, Instant};

use axe::decode::{DenoisingStats, Sampling, Step};
use axe::engine::{Cause, Engine, Event, FinishReason, Options, Outcomes, Request, State, Stop, SubmitError};
use stage::{
    CANVAS, CONTEXT, EOS, HAND_OVER, Outcome, Script, Stage, Trouble, bytes, canvases, eventually, listen,
    loaded, marked, say,
};

fn request(prompt: &str) -> Request {
    Request {
        id: prompt.to_owned(),
        prompt: bytes(prompt),
        sampling: Sampling::default(),
        stop: Stop { max_tokens: 1000, ..Stop::default() },
        channels: true,
        drafts: false,
        ..Request::default()
    }
}

async fn run(stage: &Stage, request: Request) -> Outcome {
    listen(stage.engine.submit(request).unwrap().events).await
}

fn stopping_at(strings: &[&str]) -> Request {
    let mut request = request("go");
    request.stop.strings = strings.iter().map(|s| (*s).to_owned()).collect();
    request
}

#[tokio::test]
async fn events_come_in_order_and_add_up() {
    let stage = Stage::ready(Script::saying("Hello").prefill_chunk(2), 4);
    let outcome = run(&stage, request("12345")).await;
    let kinds: Vec<u8> = outcome
        .events
        .iter()
        .map(|event| match event {
            Event::Prefill { .. } => 0,
            Event::Draft { .. } => 1,
            Event::Commit { .. } => 2,
            Event::Finish { .. } => 3,
        })
        .collect();
    assert!(kinds.is_sorted() && kinds.iter().filter(|k| **k == 3).count() == 1, "{kinds:?}");
    assert!(outcome.events.contains(&Event::Prefill { done: 5, total: 5 }));
    assert_eq!(outcome.text, "Hello");
    assert_eq!(outcome.reason, FinishReason::Stop);
    assert_eq!(outcome.tokens, [bytes("Hello"), vec![EOS]].concat());
    let usage = outcome.usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (5, 6, 1));
    assert_eq!(outcome.stats.passes, 6);
    assert!((outcome.stats.tokens_per_pass - 1.0).abs() < 1e-9);
    let stats = &outcome.stats;
    assert!(stats.prefill_s <= stats.first_token_s && stats.first_token_s <= stats.elapsed_s, "{stats:?}");

    let status = stage.engine.status();
    let counters = status.counters;
    assert_eq!(counters.requests, Outcomes { stop: 1, ..Outcomes::default() });
    assert_eq!((counters.prompt_tokens, counters.completion_tokens, counters.cached_tokens), (5, 6, 1));
    assert_eq!((counters.passes, counters.first_token_s.count()), (6, 1));
    assert_eq!((status.running, status.queue.depth, status.queue.capacity), (None, 0, 4));
    assert_eq!((status.state, status.context_length), (State::Ready, Some(CONTEXT)));
    assert_eq!(status.memory.weights, 3000);
}

#[tokio::test]
async fn jobs_run_in_the_order_of_submission() {
    let stage = Stage::ready(Script::echo().gated(), 8);
    let jobs: Vec<_> = ["a", "b", "c", "d"].map(|p| stage.engine.submit(request(p)).unwrap()).into();
    stage.script.permit(100);
    for (job, text) in jobs.into_iter().zip(["a", "b", "c", "d"]) {
        assert_eq!(listen(job.events).await.text, text);
    }
    let started: Vec<_> = stage.script.started.lock().unwrap().iter().map(|(p, _)| p.clone()).collect();
    assert_eq!(started, ["a", "b", "c", "d"].map(bytes));
}

#[tokio::test]
async fn max_tokens_is_exact_for_every_width_of_commit() {
    for width in [1, 3, 7, 64] {
        let commits: Vec<Step> =
            bytes(&"x".repeat(64)).chunks(width).map(|c| Step::Commit(c.to_vec())).collect();
        let stage = Stage::ready(Script::new(move |_| commits.clone()), 4);
        for max_tokens in [1, 2, 3, 6, 7, 8, 63, 64] {
            let mut request = request("go");
            request.stop.max_tokens = max_tokens;
            let outcome = run(&stage, request).await;
            assert_eq!(outcome.reason, FinishReason::Length);
            assert_eq!(outcome.usage.completion_tokens, max_tokens, "width {width}");
            assert_eq!(outcome.tokens.len(), max_tokens);
            assert_eq!(outcome.text, "x".repeat(max_tokens));
        }
    }
}

#[tokio::test]
async fn nothing_after_the_end_token_shows() {
    let step = Step::Commit([bytes("yes"), vec![EOS], bytes("no")].concat());
    let stage = Stage::ready(Script::new(move |_| vec![step.clone(), step.clone()]), 4);
    let outcome = run(&stage, request("go")).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("yes", FinishReason::Stop));
    assert_eq!((outcome.usage.completion_tokens, outcome.tokens.len()), (4, 4));

    let mut on = request("go");
    on.stop.ignore_eos = true;
    on.stop.max_tokens = 6;
    let outcome = run(&stage, on).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("yesno", FinishReason::Length));
}

#[tokio::test]
async fn the_end_token_as_the_last_allowed_one_is_a_stop() {
    let stage = Stage::ready(Script::saying("ab"), 4);
    let mut request = request("go");
    request.stop.max_tokens = 3;
    assert_eq!(run(&stage, request).await.reason, FinishReason::Stop);
}

#[tokio::test]
async fn stop_strings_end_the_reply_across_borders_and_never_leak() {
    let stage = Stage::ready(Script::saying("one STOP two"), 4);
    let outcome = run(&stage, stopping_at(&["STOP"])).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("one ", FinishReason::Stop));
    assert_eq!(outcome.usage.completion_tokens, "one STOP".len());
    for event in &outcome.events {
        if let Event::Commit { text, .. } = event {
            assert!(!text.contains('S'), "a partial match leaked: {text:?}");
        }
    }
    // What only looked like a stop string is flushed at the end, by the end token as by the limit.
    let outcome = run(&stage, stopping_at(&["two!"])).await;
    assert_eq!(outcome.text, "one STOP two");
    let mut cut = stopping_at(&["STOP"]);
    cut.stop.max_tokens = "one STO".len();
    let outcome = run(&stage, cut).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("one STO", FinishReason::Length));
}

#[tokio::test]
async fn characters_split_over_tokens_arrive_whole_and_a_cut_one_is_dropped() {
    let stage = Stage::ready(Script::saying("aé€😀"), 4);
    let outcome = run(&stage, request("go")).await;
    assert_eq!(outcome.text, "aé€😀");
    for (max_tokens, text) in [(2, "a"), (3, "aé"), (5, "aé"), (6, "aé€"), (9, "aé€")] {
        let mut cut = request("go");
        cut.stop.max_tokens = max_tokens;
        assert_eq!(run(&stage, cut).await.text, text, "cut at {max_tokens}");
    }
}

#[tokio::test]
async fn the_context_limits_prompt_and_output_together() {
    let stage = Stage::ready(Script::endless(), 4);
    for room in [1, 2, 10] {
        let mut request = request(&"p".repeat(CONTEXT - room));
        request.stop.max_tokens = 100_000;
        let outcome = run(&stage, request).await;
        assert_eq!((outcome.reason, outcome.usage.completion_tokens), (FinishReason::Length, room));
    }
    for n_prompt_tokens in [CONTEXT, CONTEXT + 1] {
        let refused = stage.engine.submit(request(&"p".repeat(n_prompt_tokens))).err().unwrap();
        assert_eq!(refused, SubmitError::ContextTooLong { n_prompt_tokens, n_ctx: CONTEXT });
    }
    assert_eq!(stage.engine.submit(request("")).err(), Some(SubmitError::EmptyPrompt));
    assert_eq!(stage.engine.status().counters.requests.rejected, 3);
}

#[tokio::test]
async fn a_deadline_ends_the_reply_with_what_there_is() {
    let stage = Stage::ready(Script::endless().gated(), 4);
    let mut request = request("go");
    let deadline = Instant::now() + Duration::from_secs(1);
    request.stop.deadline = Some(deadline);
    let job = stage.engine.submit(request).unwrap();
    stage.script.permit(3);
    eventually("three steps", || stage.script.steps_done() == 3).await;
    tokio::time::sleep_until(deadline.into()).await;
    // The step that is under way at the deadline is the last.
    stage.script.permit(1);
    let outcome = listen(job.events).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("xxx", FinishReason::Length));
}

#[tokio::test]
async fn a_deadline_before_the_first_token_is_an_error() {
    let stage = Stage::ready(Script::endless(), 4);
    let mut late = request("go");
    late.stop.deadline = Some(Instant::now());
    assert_eq!(run(&stage, late).await.reason, FinishReason::Cancelled(Cause::Deadline));
    assert_eq!(stage.script.steps_done(), 0);
}

#[tokio::test]
async fn a_listener_that_leaves_the_queue_frees_its_place_at_once() {
    let stage = Stage::ready(Script::endless().gated(), 1);
    let running = stage.engine.submit(request("first")).unwrap();
    eventually("the first job's start", || stage.engine.status().running.is_some()).await;
    let waiting = stage.engine.submit(request("second")).unwrap();
    let Err(SubmitError::QueueFull { capacity, retry_after }) = stage.engine.submit(request("third")) else {
        panic!("the queue should be full")
    };
    assert_eq!(capacity, 1);
    assert!((1..=60).contains(&retry_after.as_secs()));
    assert_eq!(stage.engine.status().queue.jobs[0].id, "second");
    drop(waiting);
    let third = stage.engine.submit(request("third")).unwrap();
    assert_eq!(stage.engine.status().counters.requests.cancelled, 1);
    drop((running, third));
}

#[tokio::test]
async fn a_listener_that_leaves_ends_the_job_within_one_step() {
    // In prefill (16 steps long here) after 3 steps, and while generating after 20.
    for steps_before in [3, 20] {
        let stage = Stage::ready(Script::endless().prefill_chunk(1).gated(), 4);
        let job = stage.engine.submit(request("a prompt of 16 b")).unwrap();
        stage.script.permit(steps_before);
        eventually("the steps", || stage.script.steps_done() == steps_before).await;
        drop(job);
        // One step may be under way; it gets its permit, and no other step follows.
        stage.script.permit(1);
        eventually("the end", || stage.engine.status().running.is_none()).await;
        assert!(stage.script.steps_done() <= steps_before + 1);
        assert_eq!(stage.engine.status().counters.requests.cancelled, 1);
        stage.script.permit(1000);
        let next =
            stage.engine.submit(Request { stop: Stop { max_tokens: 1, ..Stop::default() }, ..request("b") });
        assert_eq!(listen(next.unwrap().events).await.reason, FinishReason::Length);
    }
}

#[tokio::test]
async fn the_operator_cancels_waiting_and_running_jobs_and_their_listeners_hear_it() {
    let stage = Stage::ready(Script::endless().gated(), 4);
    let running = stage.engine.submit(request("run")).unwrap();
    let waiting = stage.engine.submit(request("wait")).unwrap();
    eventually("the start", || stage.engine.status().running.is_some()).await;
    assert!(stage.engine.cancel("wait"));
    let outcome = listen(waiting.events).await;
    assert_eq!(outcome.reason, FinishReason::Cancelled(Cause::Operator));
    assert_eq!(outcome.usage.prompt_tokens, 4);
    assert!(stage.engine.cancel("run"));
    stage.script.permit(1);
    assert_eq!(listen(running.events).await.reason, FinishReason::Cancelled(Cause::Operator));
    assert!(!stage.engine.cancel("run") && !stage.engine.cancel("nobody"));
}

#[tokio::test]
async fn an_idle_engine_takes_one_job_to_run_and_as_many_as_may_wait() {
    for _ in 0..100 {
        let stage = Stage::ready(Script::endless().gated(), 1);
        let _jobs = ["run", "wait"].map(|p| stage.engine.submit(request(p)).unwrap());
        let refused = stage.engine.submit(request("more")).err();
        assert!(matches!(refused, Some(SubmitError::QueueFull { capacity: 1, .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn a_waiting_jobs_time_runs_out_while_another_runs() {
    let stage = Stage::ready(Script::endless().pace(Duration::from_millis(2)), 4);
    let running = stage.engine.submit(request("run")).unwrap();
    let mut late = request("late");
    late.stop.deadline = Some(Instant::now() + Duration::from_millis(50));
    let outcome = listen(stage.engine.submit(late).unwrap().events).await;
    assert_eq!(outcome.reason, FinishReason::Cancelled(Cause::Deadline));
    let status = stage.engine.status();
    assert_eq!(status.running.map(|job| job.id), Some("run".to_owned()));
    assert_eq!((status.queue.depth, status.counters.requests.error), (0, 1));
    assert!(stage.script.started.lock().unwrap().len() == 1, "it must not have reached the model");
    drop(running);
}

#[tokio::test]
async fn a_drain_finishes_what_was_accepted_and_takes_nothing_new() {
    let stage = Stage::ready(Script::echo().gated(), 4);
    let jobs = ["a", "b"].map(|p| stage.engine.submit(request(p)).unwrap());
    stage.engine.drain();
    assert_eq!(stage.engine.submit(request("c")).err(), Some(SubmitError::Draining));
    assert_eq!(stage.engine.status().state, State::Draining);
    stage.script.permit(100);
    for (job, text) in jobs.into_iter().zip(["a", "b"]) {
        assert_eq!(listen(job.events).await.text, text);
    }
    assert_eq!(stage.engine.over().await, State::Stopped);
}

#[tokio::test]
async fn a_shutdown_cancels_everything() {
    let stage = Stage::ready(Script::endless().gated(), 4);
    let jobs = ["a", "b"].map(|p| stage.engine.submit(request(p)).unwrap());
    eventually("the start", || stage.engine.status().running.is_some()).await;
    stage.engine.shutdown();
    stage.script.permit(1);
    for job in jobs {
        assert_eq!(listen(job.events).await.reason, FinishReason::Cancelled(Cause::Shutdown));
    }
    assert_eq!(stage.engine.over().await, State::Stopped);
}

#[tokio::test]
async fn an_error_of_the_backend_ends_one_job_only() {
    for after in [0, 1, 2] {
        let stage = Stage::ready(Script::saying("hello").trouble(after, Trouble::Error), 4);
        for _ in 0..2 {
            let outcome = run(&stage, request("go")).await;
            assert_eq!(outcome.reason, FinishReason::Error("NaN in layer 3".to_owned()));
        }
        assert_eq!(stage.engine.status().state, State::Ready);
        assert_eq!(stage.engine.status().counters.requests.error, 2);
    }
}

#[tokio::test]
async fn a_panic_of_the_backend_is_a_failed_engine_that_says_so_to_everyone() {
    let stage = Stage::ready(Script::saying("hello").trouble(2, Trouble::Panic).gated(), 4);
    let jobs = ["a", "b"].map(|p| stage.engine.submit(request(p)).unwrap());
    stage.script.permit(10);
    let [running, waiting] = jobs;
    let FinishReason::Error(error) = listen(running.events).await.reason else { panic!("no error") };
    assert!(error.contains("the device fell over"), "{error}");
    assert_eq!(listen(waiting.events).await.reason, FinishReason::Cancelled(Cause::Outage));
    let State::Failed { error } = stage.engine.over().await else { panic!("not failed") };
    assert!(error.contains("while generating: the device fell over"), "{error}");
    assert!(matches!(stage.engine.submit(request("c")), Err(SubmitError::Failed { .. })));
    assert_eq!(stage.engine.status().running, None);
}

#[tokio::test]
async fn loading_reports_progress_and_its_failure() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let engine = Engine::spawn(
        move |progress| {
            progress.report(0.25, "repacking weights");
            wait.recv()?;
            Err("tensor `x` is missing".into())
        },
        Options { queue_capacity: 1, ..Options::default() },
    )
    .unwrap();
    let handle = engine.handle();
    let mut state = handle.watch();
    let wanted = State::Loading { progress: 0.25, what: "repacking weights".to_owned() };
    state.wait_for(|state| *state == wanted).await.unwrap();
    let refused = handle.submit(request("a")).err();
    assert_eq!(refused, Some(SubmitError::NotReady { what: "repacking weights".to_owned(), percent: 25 }));
    go.send(()).unwrap();
    assert_eq!(handle.over().await, State::Failed { error: "tensor `x` is missing".to_owned() });
    engine.join();

    let engine =
        Engine::spawn(|_| panic!("no device"), Options { queue_capacity: 1, ..Options::default() }).unwrap();
    let State::Failed { error } = engine.handle().over().await else { panic!("not failed") };
    assert!(error.contains("while loading the model: no device"), "{error}");
}

#[tokio::test]
async fn a_drain_while_loading_ends_the_engine_once_it_is_loaded() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let engine = Engine::spawn(
        move |progress| {
            wait.recv()?;
            progress.report(0.5, "late");
            Ok(loaded(stage::Scripted(Script::saying("x").into()), None))
        },
        Options { queue_capacity: 1, ..Options::default() },
    )
    .unwrap();
    let handle = engine.handle();
    handle.drain();
    assert_eq!(handle.status().state, State::Draining);
    go.send(()).unwrap();
    assert_eq!(handle.over().await, State::Stopped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixty_four_submitters_each_get_their_own_reply() {
    let stage = Stage::ready(Script::echo(), 64);
    let jobs = (0..64).map(|n| {
        let engine = stage.engine.clone();
        tokio::spawn(async move {
            let prompt = format!("I am number {n}");
            let outcome = listen(engine.submit(request(&prompt)).unwrap().events).await;
            assert_eq!((outcome.text, outcome.reason), (prompt, FinishReason::Stop));
        })
    });
    for job in jobs.collect::<Vec<_>>() {
        job.await.unwrap();
    }
    assert_eq!(stage.engine.status().counters.requests.stop, 64);
}

#[tokio::test]
async fn a_slow_reader_neither_blocks_the_engine_nor_grows_its_mailbox() {
    let stage = Stage::ready(Script::endless().prefill_chunk(1), 4);
    let mut long = request("a prompt of some length");
    long.stop.max_tokens = 3000;
    let slow = stage.engine.submit(long).unwrap();
    // The next job is served although nobody reads the first one's events.
    let mut short = request("b");
    short.stop.max_tokens = 1;
    assert_eq!(run(&stage, short).await.reason, FinishReason::Length);
    let outcome = listen(slow.events).await;
    assert_eq!(outcome.text, "x".repeat(3000));
    assert_eq!(outcome.tokens.len(), 3000);
    assert!(outcome.events.len() < 70, "{} events waited", outcome.events.len());
}

#[tokio::test]
async fn drafts_are_passed_on_and_only_the_newest_waits() {
    let draft = |text: &str| Step::Draft { tokens: bytes(text), entropy: vec![0.5; text.len()] };
    let steps = [draft("aaa"), draft("abb"), Step::Commit(bytes("abc")), draft("d")];
    let script = Script::new(move |_| steps.iter().cloned().chain(say("")).collect());
    let stage = Stage::ready(script.gated(), 4);
    let mut job = stage.engine.submit(request("p")).unwrap();
    stage.script.permit(3);
    eventually("the drafts", || stage.script.steps_done() == 3).await;
    eventually("the fourth step's wait", || stage.engine.status().running.is_some()).await;
    assert_eq!(job.events.recv().await, Some(Event::Prefill { done: 1, total: 1 }));
    let second = job.events.recv().await;
    // The second draft may still be on its way when the first is read; it is never read after a newer one.
    assert!(matches!(second, Some(Event::Draft { .. })), "{second:?}");
    stage.script.permit(10);
    let outcome = listen(job.events).await;
    assert_eq!((outcome.text.as_str(), outcome.stats.passes), ("abc", 5));
}

/// A stage of a model that denoises canvases of 256, of which each takes so many steps.
fn denoising(tokens: Vec<u32>, steps: &'static [usize]) -> Stage {
    Stage::thinking(Script::new(move |_| canvases(&tokens, CANVAS, steps)).denoises(), 4)
}

#[tokio::test]
async fn max_tokens_is_exact_although_a_canvas_is_wide() {
    let stage = denoising(bytes(&"x".repeat(3 * CANVAS)), &[2]);
    for max_tokens in [1, 2, 255, 256, 257, 511, 512, 768] {
        let mut request = request("go");
        request.stop.max_tokens = max_tokens;
        let outcome = run(&stage, request).await;
        assert_eq!(outcome.reason, FinishReason::Length);
        assert_eq!((outcome.usage.completion_tokens, outcome.tokens.len()), (max_tokens, max_tokens));
        assert_eq!(outcome.text, "x".repeat(max_tokens));
        let canvases = max_tokens.div_ceil(CANVAS);
        assert_eq!(outcome.stats.canvas_steps, vec![2; canvases], "no canvas more than needed");
    }
    let mut request = request(&"p".repeat(CONTEXT - 300));
    request.stop.max_tokens = 100_000;
    assert_eq!(run(&stage, request).await.usage.completion_tokens, 300, "the context is the limit, too");
}

#[tokio::test]
async fn an_end_token_in_a_canvas_drops_the_rest_unless_it_is_to_be_ignored() {
    let tokens = [bytes("yes"), vec![HAND_OVER], bytes("no")].concat();
    let stage = denoising(tokens, &[1]);
    let outcome = run(&stage, request("go")).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("yes", FinishReason::Stop));
    assert_eq!((outcome.usage.completion_tokens, outcome.tokens.len()), (4, 4));
    let mut on = request("go");
    on.stop.ignore_eos = true;
    on.stop.max_tokens = 200;
    let outcome = run(&stage, on).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), ("yesno", FinishReason::Length));
    assert_eq!(outcome.usage.completion_tokens, 200);
}

#[tokio::test]
async fn stop_strings_match_across_canvases() {
    let text = format!("{}STOP{}", "a".repeat(CANVAS - 2), "b".repeat(CANVAS));
    let stage = denoising(bytes(&text), &[1]);
    let outcome = run(&stage, stopping_at(&["STOP"])).await;
    assert_eq!((outcome.text.as_str(), outcome.reason), (&text[..CANVAS - 2], FinishReason::Stop));
    assert_eq!(outcome.usage.completion_tokens, CANVAS + 2);
    assert_eq!(outcome.stats.canvas_steps.len(), 2);
    for event in &outcome.events {
        if let Event::Commit { text, .. } = event {
            assert!(!text.contains('S'), "a partial match leaked");
        }
    }
}

#[tokio::test]
async fn denoising_is_counted_canvas_by_canvas() {
    let stage = denoising(bytes(&"x".repeat(2 * CANVAS + 1)), &[3, 1, 5]);
    let outcome = run(&stage, request("go")).await;
    assert_eq!(outcome.reason, FinishReason::Stop);
    let accepted = vec![CANVAS as u32; 9];
    assert_eq!(outcome.stats.denoising, Some(DenoisingStats { steps: 9, canvases: 3, accepted }));
    assert_eq!(outcome.stats.canvas_steps, [3, 1, 5]);
    assert_eq!(outcome.stats.passes, 9, "the commit is no pass of its own");
    assert_eq!(outcome.usage.completion_tokens, 2 * CANVAS + 2);
    assert!(outcome.stats.tokens_per_s > 0.0, "one canvas has a speed, too");
    let counters = stage.engine.status().counters;
    assert_eq!((counters.denoising_steps, counters.canvases, counters.passes), (9, 3, 9));
    assert_eq!((counters.canvas_steps.count(), counters.canvas_steps.sum), (3, 9.0));

    let causal = run(&Stage::ready(Script::saying("x"), 4), request("go")).await;
    assert_eq!((causal.stats.denoising, causal.stats.canvas_steps), (None, vec![]));
}

#[tokio::test]
async fn the_first_draft_counts_as_the_first_token() {
    let tokens = bytes("x");
    let script = Script::new(move |_| canvases(&tokens, CANVAS, &[10])).denoises();
    let stage = Stage::thinking(script.pace(Duration::from_millis(10)), 4);
    let stats = run(&stage, request("go")).await.stats;
    assert!(stats.first_token_s + 0.08 < stats.elapsed_s, "{stats:?}");
    assert!(stats.prefill_s < stats.first_token_s, "{stats:?}");
}

#[tokio::test]
async fn a_listener_that_leaves_inside_a_canvas_ends_the_job_within_one_step() {
    // In the first canvas, and in the second.
    for steps_before in [4, 14] {
        let tokens = bytes(&"x".repeat(4 * CANVAS));
        let script = Script::new(move |_| canvases(&tokens, CANVAS, &[10])).denoises().gated();
        let stage = Stage::thinking(script, 4);
        let job = stage.engine.submit(request("go")).unwrap();
        stage.script.permit(steps_before);
        eventually("the steps", || stage.script.steps_done() == steps_before).await;
        drop(job);
        stage.script.permit(1);
        eventually("the end", || stage.engine.status().running.is_none()).await;
        assert!(stage.script.steps_done() <= steps_before + 1);
        let counters = stage.engine.status().counters;
        assert_eq!(counters.requests.cancelled, 1);
        let committed = u64::from(steps_before > 11);
        assert_eq!(counters.canvas_steps.count(), committed, "an unfinished canvas has no number of steps");
    }
}

#[tokio::test]
async fn a_deadline_inside_the_first_canvas_is_an_error_and_later_ends_the_reply() {
    for (steps, reason) in [(3, FinishReason::Cancelled(Cause::Deadline)), (14, FinishReason::Length)] {
        let tokens = bytes(&"x".repeat(4 * CANVAS));
        let script = Script::new(move |_| canvases(&tokens, CANVAS, &[10])).denoises().gated();
        let stage = Stage::thinking(script, 4);
        let mut late = request("go");
        let deadline = Instant::now() + Duration::from_secs(1);
        late.stop.deadline = Some(deadline);
        let job = stage.engine.submit(late).unwrap();
        stage.script.permit(steps);
        eventually("the steps", || stage.script.steps_done() == steps).await;
        tokio::time::sleep_until(deadline.into()).await;
        stage.script.permit(1);
        let outcome = listen(job.events).await;
        assert_eq!(outcome.reason, reason);
        assert_eq!(outcome.text.len(), if steps > 11 { CANVAS } else { 0 });
    }
}

#[tokio::test]
async fn drafts_do_not_pile_up_for_a_slow_reader() {
    let tokens = bytes(&"x".repeat(200 * CANVAS));
    let stage = Stage::thinking(Script::new(move |_| canvases(&tokens, CANVAS, &[20])).denoises(), 4);
    let mut long = request("go");
    long.stop.max_tokens = CONTEXT / 2;
    let slow = stage.engine.submit(long).unwrap();
    let mut short = request("b");
    short.stop.max_tokens = 1;
    assert_eq!(run(&stage, short).await.reason, FinishReason::Length);
    let outcome = listen(slow.events).await;
    assert_eq!(outcome.text, "x".repeat(CONTEXT / 2));
    let steps = outcome.events.iter().filter_map(|event| match event {
        Event::Draft { step, .. } => Some(*step),
        _ => None,
    });
    let last = vec![20; CONTEXT / 2 / CANVAS];
    assert_eq!(
        steps.collect::<Vec<_>>(),
        last,
        "each was replaced by the next one, but the last of a canvas"
    );
    assert_eq!(outcome.stats.passes, 20 * CONTEXT / 2 / CANVAS);
}

/// Content and thoughts of a reply, for every width of commits the same.
async fn parted(reply: &str, request: impl Fn() -> Request) -> (String, String, Outcome) {
    let mut seen = Vec::new();
    for width in [1, 2, 3, 5, 7, 64] {
        let tokens = [marked(reply), vec![EOS]].concat();
        let commits: Vec<Step> = tokens.chunks(width).map(|run| Step::Commit(run.to_vec())).collect();
        let stage = Stage::thinking(Script::new(move |_| commits.clone()), 4);
        let outcome = run(&stage, request()).await;
        let counts = (outcome.usage.completion_tokens, outcome.usage.reasoning_tokens);
        seen.push((outcome.text.clone(), outcome.reasoning.clone(), counts, outcome));
    }
    let (text, reasoning, counts, outcome) = seen.pop().unwrap();
    for (other, thought, numbers, _) in seen {
        assert_eq!((other, thought, numbers), (text.clone(), reasoning.clone(), counts), "{reply}");
    }
    (text, reasoning, outcome)
}

#[tokio::test]
async fn thoughts_are_told_from_the_reply_for_every_width_of_commit() {
    for (reply, content, reasoning, reasoning_tokens) in [
        ("{thought\nI see 😀.}yes é", "yes é", "I see 😀.", 21),
        ("{thought\n}yes", "yes", "", 10),
        ("yes", "yes", "", 0),
        // The model thinks although nobody asked for it.
        ("so {thought\nhm}yes~", "so yes", "hm", 12),
    ] {
        let (text, thoughts, outcome) = parted(reply, || request("go")).await;
        assert_eq!((text.as_str(), thoughts.as_str()), (content, reasoning));
        assert_eq!(outcome.reason, FinishReason::Stop);
        assert_eq!(outcome.usage.reasoning_tokens, reasoning_tokens);
    }
}

#[tokio::test]
async fn a_budget_that_ends_inside_a_thought_is_a_length_without_content() {
    for max_tokens in [1, 5, 9, 12] {
        let short = || {
            let mut short = request("go");
            short.stop.max_tokens = max_tokens;
            short
        };
        let (text, thoughts, outcome) = parted("{thought\nand so on and on}yes", short).await;
        assert_eq!(text, "");
        assert_eq!(thoughts, "and so on"[..max_tokens.saturating_sub(9)]);
        assert_eq!(outcome.reason, FinishReason::Length);
        assert_eq!(outcome.usage.reasoning_tokens, max_tokens);
    }
}

#[tokio::test]
async fn stop_strings_end_the_reply_and_no_thought() {
    let (text, thoughts, outcome) =
        parted("{thought\nSTOP it}go ST{thought\nx}OP on", || stopping_at(&["STOP"])).await;
    assert_eq!((text.as_str(), thoughts.as_str()), ("go ", "STOP itx"));
    assert_eq!(outcome.reason, FinishReason::Stop);
}

#[tokio::test]
async fn a_prompt_that_opened_the_channel_is_continued_in_it() {
    let opened = || Request { prompt: marked("go{thought\n"), ..request("go") };
    let (text, thoughts, _) = parted("hm}yes", opened).await;
    assert_eq!((text.as_str(), thoughts.as_str()), ("yes", "hm"));
    let closed = || Request { prompt: marked("go{thought\n}"), ..request("go") };
    assert_eq!(parted("hm", closed).await.0, "hm");
}

#[tokio::test]
async fn where_channels_are_not_asked_for_all_text_is_the_reply() {
    let plain = || Request { channels: false, ..request("go") };
    let (text, thoughts, outcome) = parted("{thought\nhm}yes", plain).await;
    assert_eq!((text.as_str(), thoughts.as_str()), ("thought\nhmyes", ""));
    assert_eq!(outcome.usage.reasoning_tokens, 0);
}
