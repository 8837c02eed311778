//! What the sources of settings make of each other.

use super::*;

fn read(toml: &str, env: &[(&str, &str)], flags: Vec<Override>) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("daemon.toml");
    std::fs::write(&file, toml).unwrap();
    let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Config::from_sources(Some(&file), env, flags)
        .map_err(|e| e.to_string().replace(&file.display().to_string(), "FILE"))
}

#[test]
fn flag_beats_environment_beats_file_beats_default() {
    let flag = Override { flag: "--port", key: "server.port", value: "4".into() };
    let file = "[server]\nport = 2";
    assert_eq!(read("", &[], vec![]).unwrap().server.port, 8080);
    assert_eq!(read(file, &[], vec![]).unwrap().server.port, 2);
    assert_eq!(read(file, &[("AXE_PORT", "3")], vec![]).unwrap().server.port, 3);
    assert_eq!(read(file, &[("AXE_SERVER_PORT", "3")], vec![]).unwrap().server.port, 3);
    assert_eq!(read(file, &[("AXE_PORT", "")], vec![]).unwrap().server.port, 2);
    assert_eq!(read(file, &[("AXE_PORT", "3")], vec![flag]).unwrap().server.port, 4);
}

#[test]
fn wrong_values_name_place_key_found_and_expected() {
    let cases = [
        (
            "[server]\nport = \"a\"",
            "FILE: key `server.port`: found string \"a\", expected an integer from 0 to 65535",
        ),
        (
            "[server]\nport = 70000",
            "FILE: key `server.port`: found integer 70000, expected an integer from 0 to 65535",
        ),
        (
            "[server]\nhost = \"localhost\"",
            "FILE: key `server.host`: found string \"localhost\", expected an IP address, e.g. \"127.0.0.1\"",
        ),
        (
            "[device]\nkind = \"tpu\"",
            "FILE: key `device.kind`: found string \"tpu\", expected auto, cpu, gpu or accelerator",
        ),
        (
            "[model]\naliases = [1]",
            "FILE: key `model.aliases`: found array [1], expected a list of names, none of them empty",
        ),
        (
            "[sampling]\ntemperature = 3.0",
            "FILE: key `sampling.temperature`: found float 3.0, expected a number from 0 to 2",
        ),
        (
            "[server]\nping_interval_s = 0",
            "FILE: key `server.ping_interval_s`: found integer 0, expected a number of seconds, 0.05 or more, up to a year",
        ),
    ];
    for (toml, message) in cases {
        assert_eq!(read(toml, &[], vec![]).unwrap_err(), message);
    }
    assert_eq!(
        read("", &[("AXE_PORT", "x")], vec![]).unwrap_err(),
        "environment variable AXE_PORT: key `server.port`: found \"x\", expected an integer from 0 to 65535"
    );
}

#[test]
fn lists_hold_nothing_that_could_never_match() {
    let origins = |list: &str| read(&format!("[server]\ncors_origins = {list}"), &[], vec![]);
    for good in [
        "[]",
        "[\"*\"]",
        "[\"null\"]",
        "[\"https://a.example\", \"http://localhost:3000\", \"http://[::1]:80\", \"chrome-extension://ab\"]",
    ] {
        origins(good).unwrap();
    }
    for wrong in [
        "not a url",
        "",
        "a.example",
        "https://",
        "https://a.example/",
        "https://A.example",
        "https://a.b/c",
        "https://*.b",
    ] {
        let error = origins(&format!("[\"https://good.example\", {wrong:?}]")).unwrap_err();
        assert!(
            error.contains("`server.cors_origins`") && error.contains("as browsers send them"),
            "{error}"
        );
    }
    for wrong in ["", "  "] {
        let error = read(&format!("[model]\naliases = [\"a\", {wrong:?}]"), &[], vec![]).unwrap_err();
        assert!(error.contains("`model.aliases`") && error.contains("none of them empty"), "{error}");
    }
}

#[test]
fn a_key_that_no_request_can_carry_is_refused() {
    for wrong in ["hiddén", "hidden\u{7f}", " hidden"] {
        let error = read("", &[("AXE_API_KEY", wrong)], vec![]).unwrap_err();
        assert!(error.contains("`server.api_key`") && !error.contains("hid"), "{error}");
    }
}

#[test]
fn unknown_keys_and_sections_are_errors_that_list_the_known_ones() {
    let error = read("[admin]\nsockte = \"/a\"", &[], vec![]).unwrap_err();
    assert_eq!(
        error,
        "FILE: unknown key `admin.sockte` (found string); expected one of: admin.socket, admin.group"
    );
    let error = read("[srever]\nport = 1", &[], vec![]).unwrap_err();
    assert_eq!(
        error,
        "FILE: unknown key `srever.port` (found integer); expected one of: model, device, server, admin, log, sampling, \
         denoising, decode, studio"
    );
    let error = read("port = 1", &[], vec![]).unwrap_err();
    assert!(error.starts_with("FILE: unknown key `port` (found integer)"), "{error}");
    let error = read("[srever]", &[], vec![]).unwrap_err();
    assert!(error.starts_with("FILE: unknown key `srever` (found table)"), "{error}");
    assert!(read("[server]", &[], vec![]).is_ok());
    let error = read("[server]\nport = 1\n[server\n", &[], vec![]).unwrap_err();
    assert!(
        error.starts_with("FILE: not valid TOML: line 3, column 8: ") && !error.contains('\n'),
        "{error}"
    );
}

#[test]
fn errors_never_tell_what_may_be_a_secret() {
    for toml in [
        "[studio]\nremote_key = \"HIDDEN",
        "[studio]\nremote_key = 'HIDDEN",
        "[server]\napi_key = \"HIDDEN\" x",
        "[server]\napi_key = \"x\" HIDDEN",
        "[server]\napi_key = HIDDEN",
        "[server]\napi_key = 1HIDDEN",
        "[server]\napi_key = tHIDDEN",
        "[server]\napi_key = \"HIDDEN\\q\"",
        "[server]\napi_key = \"\"\"HIDDEN",
        "[server]\napi_key: HIDDEN",
        "[server]\napi_key HIDDEN",
        "[server]\n= HIDDEN",
        "[server]\napi_key = [\"HIDDEN\"]",
        "[server]\napi_key = [\"HIDDEN\"",
        "[server]\napi_key = {a = \"HIDDEN\"",
        "[server]\napi_key = \"HIDDEN\"\napi_key = \"HIDDEN\"",
        "[server]\napi_key = \"HIDDEN\"\n[server]\napi_key = \"HIDDEN\"",
        "[server]\napi_key.one = \"HIDDEN\"",
        "[server]\napikey = \"HIDDEN\"",
        "[server.api]\nkey = \"HIDDEN\"",
        "[[server]]\napi_key = \"HIDDEN\"",
        "[keys]\napi_key = \"HIDDEN\"",
        "api_key = \"HIDDEN\"",
        "server = \"HIDDEN\"",
        "[studio]\nremote_url = \"http://user:HIDDEN@host\"",
        "[studio]\nremote_url = \"user:HIDDEN@host\"\nremote_model = \"m\"",
        "[studio]\nremote_url = \"https:/user:HIDDEN@host\"\nremote_model = \"m\"",
        "[studio]\nremote_url = [\"http://user:HIDDEN@host\"]",
    ] {
        let error = read(toml, &[], vec![]).map(|_| ()).unwrap_err();
        assert!(!error.contains("HIDDEN") && !error.contains('\n'), "{toml}: {error}");
        assert!(error.contains("FILE"), "{toml}: {error}");
    }
    let url = [("NVIDIA_BASE_URL", "http://user:HIDDEN@host")];
    let ignored = read("", &url, vec![]).unwrap().studio.ignored.unwrap();
    assert!(ignored.contains("http://(secret)@host") && !ignored.contains("HIDDEN"), "{ignored}");
}

#[test]
fn addresses_are_shown_without_passwords() {
    let toml = |password: &str| {
        format!("[studio]\nremote_url = \"http://me:{password}@host/v1\"\nremote_model = \"m\"")
    };
    let (old, new) = (read(&toml("ONE"), &[], vec![]).unwrap(), read(&toml("TWO"), &[], vec![]).unwrap());
    let shown = format!("{old:?} {}", serde_json::to_string(&old).unwrap());
    assert!(shown.contains("http://(secret)@host/v1") && !shown.contains("ONE"), "{shown}");
    assert_eq!(old.studio.remote.as_ref().unwrap().url.expose(), "http://me:ONE@host/v1");
    let changed = changes(&old, &new);
    assert_eq!(changed.iter().map(|change| change.key).collect::<Vec<_>>(), ["studio.remote_url"]);
    for (address, shown) in [
        ("https://host/v1", "https://host/v1"),
        ("https://host:8/v1/@me", "https://host:8/v1/@me"),
        ("https://key@host/v1", "https://(secret)@host/v1"),
        ("https://a:b@c@host", "https://(secret)@host"),
        ("https://host/v1?key=x", "https://host/v1?(secret)"),
        ("ftp://a:b@host", "(secret)@host"),
    ] {
        assert_eq!(source::without_password(address), shown);
    }
}

#[test]
fn a_variable_of_a_section_must_be_a_setting() {
    let error = read("", &[("AXE_SERVER_PROT", "1")], vec![]).unwrap_err();
    assert!(error.contains("unknown key `AXE_SERVER_PROT` (found 1 characters)"), "{error}");
    assert!(error.contains("AXE_SERVER_PORT"), "{error}");
    for others in ["AXE_MODELS", "AXE_TEST_MODELS", "AXE_OPENCL", "AXE_MODEL", "SERVER_PROT"] {
        assert!(read("", &[(others, "1")], vec![]).is_ok(), "{others}");
    }
}

#[test]
fn a_network_address_needs_a_key() {
    let error = read("[server]\nhost = \"0.0.0.0\"", &[], vec![]).unwrap_err();
    assert!(error.starts_with("refusing to listen on 0.0.0.0 without an API key"), "{error}");
    let config = read("[server]\nhost = \"0.0.0.0\"", &[("AXE_API_KEY", "k")], vec![]).unwrap();
    assert_eq!(config.server.api_keys[0].secret, Secret::new("k"));
    assert!(read("[server]\nhost = \"::1\"", &[], vec![]).is_ok());
}

#[test]
fn keys_come_from_a_file_and_never_show() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# ours\nalpha-key\n\n beta-key \n").unwrap();
    let toml = format!("[server]\napi_key_file = {:?}", keys.display().to_string());
    let config = read(&toml, &[], vec![]).unwrap();
    let secrets: Vec<_> = config.server.api_keys.iter().map(|key| key.secret.expose()).collect();
    assert_eq!(secrets, ["alpha-key", "beta-key"]);
    let shown = format!("{config:?} {}", serde_json::to_string(&config).unwrap());
    assert!(!shown.contains("alpha-key") && !shown.contains("beta-key"), "{shown}");
    std::fs::write(&keys, "\n").unwrap();
    assert!(read(&toml, &[], vec![]).unwrap_err().contains("it holds no key; write one key a line"));
}

#[test]
fn keys_come_from_a_credential_where_no_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("api_keys"), "alice:one").unwrap();
    let folder = dir.path().display().to_string();
    let credentials = [("CREDENTIALS_DIRECTORY", folder.as_str())];
    let config = read("", &credentials, vec![]).unwrap();
    assert_eq!(config.server.api_keys[0].name, "alice");
    let file = config.settings.iter().find(|s| s.key == "server.api_key_file").unwrap();
    assert_eq!(file.origin, Origin::Credential(dir.path().join("api_keys")));
    std::fs::write(dir.path().join("other"), "bob:two").unwrap();
    let toml = format!("[server]\napi_key_file = {:?}", dir.path().join("other"));
    let config = read(&toml, &credentials, vec![]).unwrap();
    assert_eq!((config.server.api_keys.len(), &*config.server.api_keys[0].name), (1, "bob"));
}

#[test]
fn every_setting_tells_its_value_and_where_it_comes_from() {
    let flag = Override { flag: "--port", key: "server.port", value: "4".into() };
    let toml = "[server]\nqueue_capacity = 3\napi_key = \"hidden\"\n[model]\naliases = [\"a\"]";
    let env =
        [("AXE_SERVER_PING_INTERVAL_S", "1.5"), ("XDG_CACHE_HOME", "/x"), ("AXE_DECODE_BLOCK_SIZE", "4")];
    let config = read(toml, &env, vec![flag]).unwrap();
    let shown = |key: &str| {
        let setting = config.settings.iter().find(|setting| setting.key == key).unwrap();
        let kind = match &setting.origin {
            Origin::File(_) => "file",
            Origin::Env(name) => name,
            Origin::Flag(name) => name,
            Origin::Credential(_) => "credential",
            Origin::Default => "default",
        };
        format!("{} {kind}", setting.value)
    };
    for (key, expected) in [
        ("server.port", "4 --port"),
        ("server.queue_capacity", "3 file"),
        ("server.api_key", "\"(secret)\" file"),
        ("server.ping_interval_s", "1.5 AXE_SERVER_PING_INTERVAL_S"),
        ("server.host", "\"127.0.0.1\" default"),
        ("decode.block_size", "4 AXE_DECODE_BLOCK_SIZE"),
        ("model.aliases", "[\"a\"] file"),
        ("model.path", "null default"),
        ("device.cache_dir", "\"/x/axed\" default"),
    ] {
        assert_eq!(shown(key), expected, "{key}");
    }
    assert!(!format!("{:?}", config.settings).contains("hidden"));
    let mut keys: Vec<_> = config.settings.iter().map(|setting| setting.key).collect();
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all, "each setting is told once");
}

#[test]
fn two_variables_for_one_setting_must_agree() {
    for (short, full) in [
        ("AXE_MODEL", "AXE_MODEL_PATH"),
        ("AXE_SERVED_NAME", "AXE_MODEL_SERVED_NAME"),
        ("AXE_HOST", "AXE_SERVER_HOST"),
        ("AXE_PORT", "AXE_SERVER_PORT"),
        ("AXE_API_KEY", "AXE_SERVER_API_KEY"),
    ] {
        let error = read("", &[(short, "127.0.0.1"), (full, "127.0.0.2")], vec![]).unwrap_err();
        assert!(error.contains(short) && error.contains(full), "{error}");
        assert!(!error.contains("127.0"), "it may be a secret: {error}");
    }
    let same = [("AXE_PORT", "9"), ("AXE_SERVER_PORT", "9")];
    assert_eq!(read("", &same, vec![]).unwrap().server.port, 9);
    let unset = [("AXE_PORT", ""), ("AXE_SERVER_PORT", "9")];
    assert_eq!(read("", &unset, vec![]).unwrap().server.port, 9);
    let flag = Override { flag: "--port", key: "server.port", value: "7".to_owned() };
    let differ = [("AXE_PORT", "8"), ("AXE_SERVER_PORT", "9")];
    assert_eq!(read("", &differ, vec![flag]).unwrap().server.port, 7);
}

#[test]
fn variables_of_other_programs_are_no_reason_not_to_start() {
    let url = ("NVIDIA_BASE_URL", "https://host/v1/");
    let studio = |toml: &str, env: &[(&str, &str)]| Ok::<_, String>(read(toml, env, vec![])?.studio);
    let ignored = studio("", &[url]).unwrap();
    assert!(ignored.remote.is_none());
    assert_eq!(
        ignored.ignored.unwrap(),
        "the studio has no second backend: environment variable NVIDIA_BASE_URL: key `studio.remote_url`: found \
         \"https://host/v1/\" and no model, expected a URL as in https://host/v1, with `studio.remote_model` (or \
         NVIDIA_MODEL) naming a model there"
    );
    let ignored = studio("", &[("NVIDIA_BASE_URL", "host"), ("NVIDIA_MODEL", "m")]).unwrap();
    assert!(ignored.remote.is_none() && ignored.ignored.unwrap().contains("found \"host\", expected"));
    for env in [&[][..], &[("NVIDIA_MODEL", "m"), ("NVIDIA_API_KEY", "k")]] {
        let studio = studio("", env).unwrap();
        assert!(studio.remote.is_none() && studio.ignored.is_none());
    }
    let whole = studio("", &[url, ("NVIDIA_MODEL", "m"), ("NVIDIA_API_KEY", "k")]).unwrap();
    let remote = whole.remote.unwrap();
    assert_eq!((remote.url.expose(), &*remote.model), ("https://host/v1", "m"));
    assert!(remote.key.is_some() && whole.ignored.is_none());
    // Who says it to this program meant it, and is believed before what others were told.
    let own = [url, ("AXE_STUDIO_REMOTE_URL", "http://other"), ("AXE_STUDIO_REMOTE_MODEL", "n")];
    assert_eq!(studio("", &own).unwrap().remote.unwrap().url.expose(), "http://other");
    for wrong in ["remote_url = \"https://host/v1\"", "remote_url = \"host\"\nremote_model = \"m\""] {
        let error = studio(&format!("[studio]\n{wrong}"), &[]).unwrap_err();
        assert!(error.starts_with("FILE: key `studio.remote_url`: found "), "{error}");
    }
    let error = studio("", &[("AXE_STUDIO_REMOTE_URL", "https://host")]).unwrap_err();
    assert!(error.contains("AXE_STUDIO_REMOTE_URL"), "{error}");
}

#[test]
fn a_context_has_room_for_prompt_and_output() {
    assert!(read("[model]\ncontext_length = 1", &[], vec![]).unwrap_err().contains("from 2 to"));
    assert_eq!(read("[model]\ncontext_length = 2", &[], vec![]).unwrap().model.context_length, Some(2));
    assert_eq!(read("[model]\ncontext_length = 0", &[], vec![]).unwrap().model.context_length, None);
}

#[test]
fn a_block_size_is_auto_or_a_number_of_rows() {
    let size = |toml: &str, env: &[(&str, &str)]| Ok(read(toml, env, vec![])?.decode.size);
    assert_eq!(size("", &[]), Ok(BlockSize::Auto));
    assert_eq!(size("[decode]\nblock_size = 4", &[]), Ok(BlockSize::Fixed(4)));
    assert_eq!(size("[decode]\nblock_size = \"16\"", &[]), Ok(BlockSize::Fixed(16)));
    assert_eq!(size("[decode]\nblock_size = 4", &[("AXE_DECODE_BLOCK_SIZE", "auto")]), Ok(BlockSize::Auto));
    for wrong in ["0", "17", "-1", "\"wide\"", "1.5", "true"] {
        let error: String = size(&format!("[decode]\nblock_size = {wrong}"), &[]).unwrap_err();
        assert!(error.ends_with("expected \"auto\" or an integer from 1 to 16"), "{error}");
    }
    assert!(read("[decode]\nngram_pool = true", &[], vec![]).unwrap().decode.pool);
}

#[test]
fn relative_paths_of_the_file_count_from_its_folder() {
    let config = read("[model]\npath = \"m.gguf\"", &[], vec![]).unwrap();
    let path = config.model.path.clone().unwrap();
    assert!(path.is_absolute() && path.ends_with("m.gguf"), "{}", path.display());
    assert_eq!(config.model.name(), "m");
    let config = read("[model]\npath = \"m.gguf\"", &[("AXE_MODEL", "n.gguf")], vec![]).unwrap();
    assert_eq!(config.model.path.unwrap(), Path::new("n.gguf"));
}

#[test]
fn default_folders_follow_systemd_then_the_desktop() {
    let systemd = [("CACHE_DIRECTORY", "/c/axed:/c/other"), ("RUNTIME_DIRECTORY", "/r/axed")];
    let config = read("", &systemd, vec![]).unwrap();
    assert_eq!(config.device.cache_dir, Path::new("/c/axed"));
    assert_eq!(config.admin.socket, Path::new("/r/axed/admin.sock"));
    let config = read("", &[("XDG_CACHE_HOME", "/x")], vec![]).unwrap();
    assert_eq!(config.device.cache_dir, Path::new("/x/axed"));
    let config = read("", &[("HOME", "/h")], vec![]).unwrap();
    assert_eq!(config.device.cache_dir, Path::new("/h/.cache/axed"));
}

#[test]
fn the_shipped_file_is_valid_says_the_defaults_and_explains_every_key() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("daemon.toml");
    let bare = Config::from_sources(None, BTreeMap::new(), vec![]).unwrap();
    let mut config = Config::from_sources(Some(&shipped), BTreeMap::new(), vec![]).unwrap();
    config.file = None;
    assert_eq!(serde_json::to_value(&config).unwrap(), serde_json::to_value(&bare).unwrap());
    let text = std::fs::read_to_string(shipped).unwrap();
    let mut above = "";
    for line in text.lines() {
        let is_key = line.contains(" = ") && !line.starts_with("# ");
        assert!(!is_key || above.starts_with("# "), "`{line}` has no explanation above it");
        above = line;
    }
}
