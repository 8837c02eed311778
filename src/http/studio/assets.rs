//! The pages and what they load, embedded in the program.

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use crate::http::error::ApiError;
use crate::http::fields::quoted;
use crate::http::hex;

/// A file of the studio.
struct Asset {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

macro_rules! asset {
    ($name:literal, $kind:expr) => {
        Asset { name: $name, kind: $kind, text: include_str!(concat!("page/", $name)) }
    };
}

const CHAT: Asset = asset!("index.html", HTML);
const EDIT: Asset = asset!("edit.html", HTML);

/// What pages load, by name under `/studio/`.
const FILES: &[Asset] = &[
    asset!("answer.js", SCRIPT),
    asset!("diff.js", SCRIPT),
    asset!("draft.js", SCRIPT),
    asset!("edit.css", STYLE),
    asset!("edit.js", SCRIPT),
    asset!("events.js", SCRIPT),
    asset!("history.js", SCRIPT),
    asset!("icon.svg", "image/svg+xml"),
    asset!("main.js", SCRIPT),
    asset!("page.js", SCRIPT),
    asset!("paper.js", SCRIPT),
    asset!("plots.js", SCRIPT),
    asset!("recording.js", SCRIPT),
    asset!("replay.js", SCRIPT),
    asset!("settings.js", SCRIPT),
    asset!("store.js", SCRIPT),
    asset!("studio.css", STYLE),
];

/// Scripts and styles come from here only, nothing is inline, nothing leaves for elsewhere, nobody frames the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Whether a request is for a page or a part of one, which anybody may load.
pub(in crate::http) fn is_page(method: &Method, path: &str) -> bool {
    path == "/"
        || (path == "/edit" && *method != Method::POST)
        || path.strip_prefix("/studio/").is_some_and(|name| FILES.iter().any(|file| file.name == name))
}

pub(in crate::http) async fn editor(headers: HeaderMap) -> Response {
    serve(&EDIT, &headers)
}

pub(super) async fn page(headers: HeaderMap) -> Response {
    serve(&CHAT, &headers)
}

pub(super) async fn file(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    match FILES.iter().find(|file| file.name == name) {
        Some(file) => Ok(serve(file, &headers)),
        None => {
            let message = format!("the studio has no file {}", quoted(&name));
            Err(ApiError::refused(StatusCode::NOT_FOUND, message).code("unknown_url"))
        }
    }
}

fn serve(asset: &Asset, asked: &HeaderMap) -> Response {
    let tag = format!("\"{}\"", hex(&Sha256::digest(asset.text.as_bytes())[..8]));
    let same = asked.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response =
        if same { StatusCode::NOT_MODIFIED.into_response() } else { asset.text.into_response() };
    let headers = response.headers_mut();
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    for (name, value) in [
        (header::CONTENT_TYPE, asset.kind),
        // Asked about each time, so that a page and its modules are always of one build.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_nothing_that_their_policy_forbids() {
        for page in [&CHAT, &EDIT] {
            for forbidden in
                [" style=\"", " onclick=", " onload=", "<style", "javascript:", "http://", "https://"]
            {
                assert!(!page.text.contains(forbidden), "{}: {forbidden}", page.name);
            }
            // Each script tag names a file.
            assert_eq!(page.text.matches("<script").count(), page.text.matches("src=\"/studio/").count());
        }
        for file in FILES.iter().filter(|file| file.kind == SCRIPT) {
            for forbidden in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
            {
                assert!(!file.text.contains(forbidden), "{}: {forbidden}", file.name);
            }
        }
    }

    #[test]
    fn every_module_that_is_imported_exists() {
        for file in FILES.iter().filter(|file| file.kind == SCRIPT) {
            for import in file.text.lines().filter_map(|line| line.split(" from \"./").nth(1)) {
                let name = import.trim_end_matches("\";");
                assert!(FILES.iter().any(|file| file.name == name), "{} imports {name}", file.name);
            }
        }
    }
}
